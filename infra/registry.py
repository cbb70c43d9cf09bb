"""The model registry in MLflow: one registered model per domain, numbered versions, an alias per stage.

The alias is the one truth about a stage, because moving it is one atomic write: readers see the old version or the new
one, never none and never two. The ``stage`` tags are a copy for people who look at MLflow; a crash can leave them
behind, nothing reads a stage from them alone, and the next move puts them right.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import AwareDatetime

from infra.errors import CheckFailed, UsageError
from infra.hashing import tree_hash
from infra.locks import HeldLock, exclusive
from infra.mlflow_client import experiment_id, explained, local_path, open_client
from infra.names import check_domain
from infra.records import Record
from infra.settings import Settings

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion as MlflowVersion

Stage = Literal["none", "staging", "production", "archived"]
Target = Literal["staging", "production", "archived"]

STAGE_TAG = "stage"
KEY_TAG = "senmon.key"
HASH_TAG = "senmon.sha256"
DOMAIN_TAG = "senmon.domain"
LOCK_SECONDS = 120.0


class ModelVersion(Record):
    """One version of a domain's policy. ``sha256`` is the tree hash of its folder, checked at each download."""

    domain: str
    version: int
    stage: Stage
    source: str
    key: str
    sha256: str
    run_id: str
    tags: dict[str, str]
    created_at: AwareDatetime


class VersionNotFound(CheckFailed):
    """The domain has no such version, or none in this stage."""


class Registry:
    """Versions and stages of all domains, in ``settings.tracking``. Safe from many threads and processes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = open_client(settings)

    def register(
        self, domain: str, policy_dir: Path, *, key: str, tags: Mapping[str, str], run_id: str | None = None
    ) -> ModelVersion:
        """Copies ``policy_dir`` into the store and gives it the next version number; same key, same version.

        Args:
            domain: name of the registered model.
            policy_dir: folder of the policy, with ``config.json`` at its root.
            key: makes the call idempotent, also between concurrent callers: the second gets the first's version.
            tags: kept with the version.
            run_id: MLflow run that made the policy and will hold its files; None makes a run for that purpose.

        Raises:
            UsageError: no policy there, an empty key, or a reserved tag.
            CheckFailed: MLflow is away, or the folder changed while it was copied.
        """
        check_domain(domain)
        _check_input(policy_dir, key, tags)
        if (known := self._by_key(domain, key)) is not None:
            return known
        sha256 = tree_hash(policy_dir)
        run = self._run(domain, key, run_id)
        source = self._store(run, policy_dir, sha256)
        with self._alone(domain):
            if (known := self._by_key(domain, key)) is not None:
                return known
            with explained(self._settings):
                self._ensure_model(domain)
                made = self._client.create_model_version(
                    domain,
                    source=source,
                    run_id=run.info.run_id,
                    tags={**tags, KEY_TAG: key, HASH_TAG: sha256, STAGE_TAG: "none"},
                )
        return _version(made, [])

    def set_stage(self, domain: str, version: int, stage: Target) -> ModelVersion:
        """Moves a version to ``stage``; the version that had it is archived. Repeating it is a no-op.

        Raises:
            VersionNotFound: no such version.
            CheckFailed: a version in production was asked back to staging, which would leave production empty.
        """
        with self._alone(domain):
            versions = {entry.version: entry for entry in self.versions(domain)}
            if version not in versions:
                raise _not_found(domain, f"version {version}")
            aliases = self._aliases(domain)
            present = versions[version].stage
            if stage == "staging" and present == "production":
                raise CheckFailed(
                    f"version {version} of {domain} is in production already",
                    where=f"registry, model {domain}",
                    fix="promote another version to production first",
                )
            with explained(self._settings):
                if stage != present:
                    self._move_aliases(domain, version, stage, aliases)
                self._copy_to_tags(domain, version, stage, versions)
        return self.get(domain, version)

    def resolve(self, domain: str, ref: str) -> ModelVersion:
        """The version that ``ref`` names: ``staging``, ``production``, or a number such as ``7``.

        Raises:
            UsageError: ``ref`` is none of these.
            VersionNotFound: the domain has no such version, or none in this stage.
        """
        check_domain(domain)
        if ref.isascii() and ref.isdigit():
            return self.get(domain, int(ref))
        if ref not in ("staging", "production"):
            raise UsageError(
                f"{ref!r} is neither a stage nor a version",
                where=f"model {domain}",
                fix="use 'staging', 'production' or a version number",
            )
        with self._translated(domain, f"version in {ref}"):
            found = self._client.get_model_version_by_alias(domain, ref)
        entry = _version(found, found.aliases)
        if entry.stage != ref:  # on its way to production: the old alias is about to go
            raise _not_found(domain, f"version in {ref}")
        return entry

    def get(self, domain: str, version: int) -> ModelVersion:
        """One version by number; :class:`VersionNotFound` if there is none."""
        with self._translated(check_domain(domain), f"version {version}"):
            found = self._client.get_model_version(domain, str(version))
        return _version(found, found.aliases)

    def versions(self, domain: str) -> Sequence[ModelVersion]:
        """All versions of a domain, oldest first; none if the domain has no model."""
        aliases = self._aliases(check_domain(domain))
        found: list[MlflowVersion] = []
        token: str | None = None
        with explained(self._settings):
            while True:
                page = self._client.search_model_versions(f"name='{domain}'", page_token=token)
                found.extend(page)
                token = page.token
                if not token:
                    break
        held = [_version(entry, [name for name, at in aliases.items() if at == int(entry.version)]) for entry in found]
        return sorted(held, key=lambda entry: entry.version)

    def domains(self) -> Sequence[str]:
        """The domains that have registered versions, by name; other people's models on the same server are left out."""
        names: list[str] = []
        token: str | None = None
        with explained(self._settings):
            while True:
                page = self._client.search_registered_models(page_token=token)
                names.extend(model.name for model in page if DOMAIN_TAG in model.tags)
                token = page.token
                if not token:
                    break
        return sorted(names)

    def download(self, version: ModelVersion) -> Path:
        """The version's policy as a local folder, checked against its hash; fetched once if it is stored elsewhere.

        Raises:
            CheckFailed: files are missing or altered, or the store is away.
        """
        where = f"version {version.version} of {version.domain}, {version.source}"
        folder = local_path(version.source) or self._fetch(version)
        if not (folder / "config.json").is_file():
            raise CheckFailed(
                "the policy's files are gone", where=where, fix="restore the artifact store, or serve another version"
            )
        if tree_hash(folder) != version.sha256:
            raise CheckFailed(
                "the policy's files are not those that were registered: their hash differs",
                where=where,
                fix=f"restore {folder} (or delete it, if it is a download), or serve another version",
            )
        return folder

    def _alone(self, domain: str) -> AbstractContextManager[HeldLock]:
        return exclusive(self._settings, f"registry-{check_domain(domain)}", wait_s=LOCK_SECONDS)

    def _by_key(self, domain: str, key: str) -> ModelVersion | None:
        return next((entry for entry in self.versions(domain) if entry.key == key), None)

    def _run(self, domain: str, key: str, run_id: str | None) -> Run:
        with explained(self._settings):
            if run_id is not None:
                return self._client.get_run(run_id)
            experiment = experiment_id(self._client, self._settings, domain)
            run = self._client.create_run(experiment, run_name=f"register {key}"[:250], tags={KEY_TAG: key})
            self._client.set_terminated(run.info.run_id, "FINISHED")
            return run

    def _store(self, run: Run, policy_dir: Path, sha256: str) -> str:
        """Copies the policy below the run's artifacts and returns its URI; a local copy appears whole or not at all."""
        name = f"policy-{sha256[:16]}"
        source = f"{run.info.artifact_uri.rstrip('/')}/{name}"
        target = local_path(source)
        if target is None:
            with explained(self._settings):
                self._client.log_artifacts(run.info.run_id, str(policy_dir), name)
            return source
        with _whole(target) as folder:
            if folder is not None:
                shutil.copytree(policy_dir, folder)
                if tree_hash(folder) != sha256:
                    raise CheckFailed(
                        "the policy changed while it was copied",
                        where=str(policy_dir),
                        fix="register it after training has ended",
                    )
        return source

    def _fetch(self, version: ModelVersion) -> Path:
        from mlflow.artifacts import download_artifacts

        target = self._settings.root / "downloads" / version.domain / f"{version.version}-{version.sha256[:16]}"
        with _whole(target) as folder:
            if folder is not None:
                scratch = folder / ".fetching"
                scratch.mkdir(parents=True)
                with explained(self._settings):
                    fetched = download_artifacts(
                        version.source, dst_path=str(scratch), tracking_uri=self._settings.tracking
                    )
                for path in list(Path(fetched).iterdir()):
                    path.rename(folder / path.name)
                shutil.rmtree(scratch)
        return target

    def _ensure_model(self, domain: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(domain, tags={DOMAIN_TAG: "true"})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _aliases(self, domain: str) -> dict[str, int]:
        from mlflow.exceptions import MlflowException

        with explained(self._settings):
            try:
                model = self._client.get_registered_model(domain)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return {}
                raise
        return {name: int(version) for name, version in model.aliases.items()}

    def _move_aliases(self, domain: str, version: int, stage: Target, aliases: Mapping[str, int]) -> None:
        if stage != "archived":
            # The one write that decides. Where an old alias stays behind, `production` counts.
            self._client.set_registered_model_alias(domain, stage, str(version))
        if stage != "staging" and aliases.get("staging") == version:
            self._client.delete_registered_model_alias(domain, "staging")
        if stage == "archived" and aliases.get("production") == version:
            self._client.delete_registered_model_alias(domain, "production")

    def _copy_to_tags(self, domain: str, version: int, stage: Target, versions: Mapping[int, ModelVersion]) -> None:
        for number, entry in versions.items():
            moved_out = number != version and stage != "archived" and entry.stage == stage
            wanted: Stage = stage if number == version else "archived" if moved_out else entry.stage
            if entry.tags.get(STAGE_TAG, "none") != wanted:
                self._client.set_model_version_tag(domain, str(number), STAGE_TAG, wanted)

    @contextmanager
    def _translated(self, domain: str, what: str) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        with explained(self._settings):
            try:
                yield
            except MlflowException as error:
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise _not_found(domain, what) from error
                raise


def _not_found(domain: str, what: str) -> VersionNotFound:
    return VersionNotFound(
        f"{domain} has no {what}",
        where=f"registry, model {domain}",
        fix=f"run the pipeline first (senmon run {domain}), or promote a version (senmon promote {domain} --to …)",
    )


def _check_input(policy_dir: Path, key: str, tags: Mapping[str, str]) -> None:
    if not (policy_dir / "config.json").is_file():
        raise UsageError("no policy to register: config.json is missing", where=str(policy_dir), fix="check the path")
    reserved = sorted(name for name in tags if name == STAGE_TAG or name.startswith("senmon."))
    if reserved or not key:
        raise UsageError(
            f"reserved tags: {', '.join(reserved)}" if reserved else "an empty key",
            where="registration",
            fix="give a key; keep 'stage' and 'senmon.*' out of the tags",
        )


def _version(found: MlflowVersion, held: Sequence[str]) -> ModelVersion:
    """``held``: the aliases that point at this version."""
    tag = found.tags.get(STAGE_TAG, "none")
    stage: Stage = "none" if tag == "none" else "archived"
    if "production" in held:
        stage = "production"
    elif "staging" in held:
        stage = "staging"
    return ModelVersion(
        domain=found.name,
        version=int(found.version),
        stage=stage,
        source=found.source,
        key=found.tags.get(KEY_TAG, ""),
        sha256=found.tags.get(HASH_TAG, ""),
        run_id=found.run_id or "",
        tags=found.tags,
        created_at=datetime.fromtimestamp(found.creation_timestamp / 1000, UTC),
    )


@contextmanager
def _whole(target: Path) -> Iterator[Path | None]:
    """A place to build ``target``, renamed into place at the end; None if it is there already (content-addressed)."""
    if target.exists():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield building
        try:
            building.rename(target)
        except OSError:
            if not target.exists():  # else somebody else was first, with the same content
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
