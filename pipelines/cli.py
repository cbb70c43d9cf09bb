"""The ``senmon`` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.errors import EXIT_USAGE
from pipelines.output import EXIT_INTERRUPTED, command, emit, result, table

if TYPE_CHECKING:
    from rich.console import Console

    from infra.catalog import Promotion
    from infra.settings import Settings

app = typer.Typer(
    name="senmon",
    help="Turns an open-weight reasoning model into your company's own domain agent, and keeps it in service.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""Base of everything the command line refuses; Typer exports only its subclasses."""

DomainArgument = Annotated[str, typer.Argument(metavar="DOMAIN", help="Bundled name, or folder with domain.yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, on the last line of stdout.")]


class StageName(StrEnum):
    """Stages a version can be moved to."""

    staging = "staging"
    production = "production"


class PlanMode(StrEnum):
    """What a memory plan is for."""

    rl = "rl"
    sft = "sft"
    lora = "lora"
    infer = "infer"


class PlanDtype(StrEnum):
    """Dtypes of a memory plan."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def _settings() -> Settings:
    """Settings from the environment; a bad variable is bad input."""
    from pydantic import ValidationError

    from infra.errors import UsageError
    from infra.settings import Settings

    try:
        return Settings()
    except ValidationError as error:
        problem = error.errors()[0]
        name = "SENMON_" + "_".join(map(str, problem["loc"])).upper()
        raise UsageError(f"{name}: {problem['msg']}", where="environment", fix=f"correct or unset {name}") from None


@app.command()
def run(
    domain: DomainArgument,
    stages: Annotated[str | None, typer.Option(help="Only these stages: a..b, a.., ..b or a.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the domain's latest unfinished run.")] = False,
    promote: Annotated[bool, typer.Option("--promote", help="Into production as well, if the gate says yes.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value of domain.yaml.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the run; the same as --set seed=N.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole pipeline: contract, snapshot, SFT, RL, evaluation, gate, registry."""
    with command(as_json):
        from infra.errors import SenmonError
        from pipelines.runner import Interrupted, RunRequest, run_domain

        request = RunRequest(domain, stages, resume, promote, tuple(overrides or ()), seed)
        try:
            summary = run_domain(_settings(), request)
        except Interrupted as stop:
            message = f"run {stop.run_id} stopped; nothing is lost"
            error = SenmonError(message, where=f"run {stop.run_id}", fix=f"senmon run {shlex.quote(domain)} --resume")
            typer.echo(f"{error}", err=True)
            if as_json:
                value = {"what": error.what, "where": error.where, "fix": error.fix}
                emit({"error": value, "exit_code": EXIT_INTERRUPTED})
            raise typer.Exit(EXIT_INTERRUPTED) from None
        result(as_json, summary, lambda console: table(console, ("figure", "value"), list(summary.items())))


@app.command()
def serve(
    domains: Annotated[list[str] | None, typer.Argument(metavar="[DOMAIN]...", help="Default: all registered.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; there are no API keys yet.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    stage: Annotated[StageName, typer.Option(help="Serve this stage by default.")] = StageName.production,
    as_json: JsonOption = False,
) -> None:
    """Serve promoted versions through an OpenAI-compatible gateway that follows the registry."""
    with command(as_json):
        from serving.server import serve as serve_gateway

        settings = _settings()
        names = _served_names(settings, domains or [])

        def ready(url: str) -> None:
            value = {"url": url, "domains": names, "stage": stage.value}
            result(as_json, value, lambda console: console.print(f"serving {', '.join(names) or 'all'} at {url}"))

        serve_gateway(settings, names or None, host, port, stage.value, ready=ready)


def _served_names(settings: Settings, references: list[str]) -> list[str]:
    """Names of the domains to serve; a domain that has no registered version yet is refused."""
    if not references:
        return []
    from infra.errors import UsageError
    from infra.registry import Registry
    from infra.yaml_file import did_you_mean
    from pipelines.spec import domain_name

    registered = list(Registry(settings).domains())
    names = [domain_name(reference) for reference in references]
    for reference, name in zip(references, names, strict=True):
        if name not in registered:
            raise UsageError(
                f"{name} has no registered version{did_you_mean(name, registered)}",
                where="DOMAIN",
                fix=f"senmon run {shlex.quote(reference)} --promote; registered: {', '.join(registered) or 'none'}",
            )
    return names


@app.command()
def domains(as_json: JsonOption = False) -> None:
    """List the bundled domains and those that ran here."""
    with command(as_json):
        from pipelines.overview import list_domains

        rows = list_domains(_settings())
        columns = ("name", "description", "last run", "status", "staging", "production")
        result(
            as_json,
            {"domains": [row.payload() for row in rows]},
            lambda console: table(
                console,
                columns,
                [(r.name, r.description, r.last_run, r.last_status, r.staging, r.production) for r in rows],
            ),
        )


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what is installed, reachable and missing, and which environments and verifiers were found."""
    with command(as_json):
        from pipelines.doctor import examine

        checks = examine(_settings())
        healthy = not any(check.state == "failed" for check in checks)
        rows = [(check.state, check.name, check.detail, check.fix) for check in checks]
        result(
            as_json,
            {"healthy": healthy, "checks": [check.payload() for check in checks]},
            lambda console: table(console, ("state", "what", "found", "fix"), rows),
        )
        if not healthy:
            raise typer.Exit(1)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="gpt-oss-20b, gpt-oss-120b, tiny-moe, or a folder or config.json.")],
    gpus: Annotated[str, typer.Option(metavar="COUNTxNAME-SIZEGB", help="For example 64xH100-80GB or 1xCPU-24GB.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the micro-batch of a data rank.")] = 1,
    mode: Annotated[PlanMode, typer.Option(help="What is done; lora is RL with adapters.")] = PlanMode.rl,
    expert: Annotated[int, typer.Option(min=1, help="Ranks that share the experts of a layer.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Ranks that share every sequence.")] = 1,
    precision: Annotated[PlanDtype, typer.Option(help="Of the computation.")] = PlanDtype.float32,
    weights: Annotated[PlanDtype, typer.Option(help="Of weights, gradients and optimizer.")] = PlanDtype.float32,
    checkpointing: Annotated[bool, typer.Option(help="Compute layers again in the backward pass.")] = False,
    offload: Annotated[bool, typer.Option(help="Keep weights and optimizer in host memory.")] = False,
    lora_rank: Annotated[int, typer.Option(min=1, help="Of the adapters in mode lora.")] = 16,
    rollouts: Annotated[int, typer.Option(min=0, help="Sequences sampled at once by a rank; 0 = the batch.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Say how much memory training or inference needs on each GPU, what fits, and which knob to turn."""
    with command(as_json):
        from infra.compute.planner.hardware import parse_gpus
        from infra.compute.planner.models import describe
        from infra.compute.planner.plan import make_plan
        from infra.compute.planner.request import PlanRequest
        from infra.compute.sharding.config import ShardingConfig
        from pipelines.planning import show_plan

        sharding = ShardingConfig(
            expert=expert,
            sequence=sequence,
            precision=precision.value,
            activation_checkpointing=checkpointing,
            offload=offload,
        )
        request = PlanRequest(
            parse_gpus(gpus), context, batch, mode.value, sharding, weights.value, lora_rank, rollouts
        )
        planned = make_plan(describe(model), request)
        result(as_json, planned.payload(), lambda console: show_plan(console, planned))
        if not planned.fits:
            raise typer.Exit(1)


@app.command()
def promote(
    domain: DomainArgument,
    to: Annotated[StageName, typer.Option(help="Where to.")] = StageName.production,
    version: Annotated[int | None, typer.Option(min=1, help="Version to move; default: the one in staging.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Judge a version by its gate, move it to a stage, and write the ledger."""
    with command(as_json):
        from infra.catalog import Catalog
        from infra.errors import UsageError
        from infra.registry import Registry
        from pipelines.promotion import promote as promote_version
        from pipelines.spec import domain_name

        if version is None and to is StageName.staging:
            raise UsageError("which version?", where="--to staging", fix="add --version N; see: senmon history DOMAIN")
        settings, name = _settings(), domain_name(domain)
        reference = "staging" if version is None else str(version)
        with Catalog.open(settings.catalog) as catalog:
            entry = promote_version(settings, Registry(settings), catalog, name, to.value, reference)
        _show_move(as_json, entry)


@app.command()
def rollback(
    domain: DomainArgument,
    why: Annotated[str, typer.Option(help="Reason, for the ledger.")] = "senmon rollback",
    as_json: JsonOption = False,
) -> None:
    """Put the version that was in production before back into production."""
    with command(as_json):
        from infra.catalog import Catalog
        from infra.registry import Registry
        from pipelines.promotion import rollback as roll_back
        from pipelines.spec import domain_name

        settings = _settings()
        with Catalog.open(settings.catalog) as catalog:
            entry = roll_back(settings, Registry(settings), catalog, domain_name(domain), why)
        _show_move(as_json, entry)


@app.command()
def history(domain: DomainArgument, as_json: JsonOption = False) -> None:
    """Show the domain's ledger: which version moved where, when, by whom and why."""
    with command(as_json):
        from pipelines.overview import domain_history

        name, ledger = domain_history(_settings(), domain)
        rows = [
            (f"{e.created_at:%Y-%m-%d %H:%M:%S}", e.version, f"{e.from_stage} → {e.to_stage}", e.who, e.why)
            for e in ledger
        ]
        value: dict[str, Any] = {"domain": name, "promotions": [entry.payload() for entry in ledger]}
        result(as_json, value, lambda console: table(console, ("when (UTC)", "version", "move", "who", "why"), rows))


def _show_move(as_json: bool, entry: Promotion) -> None:
    text = f"{entry.domain} version {entry.version}: {entry.from_stage} → {entry.to_stage}"

    def show(console: Console) -> None:
        console.print(text)

    result(as_json, entry.payload(), show)


def main() -> None:
    """Entry point of the ``senmon`` command; with ``--json``, wrong usage is one JSON line too."""
    if "--json" not in sys.argv[1:]:
        app(prog_name="senmon")
        return
    try:
        code = app(prog_name="senmon", standalone_mode=False)
    except USAGE_ERROR as error:
        what = error.format_message()
        print(f"error: {what}", file=sys.stderr)
        fix = "see senmon COMMAND --help"
        emit({"error": {"what": what, "where": "command line", "fix": fix}, "exit_code": EXIT_USAGE})
        sys.exit(EXIT_USAGE)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
