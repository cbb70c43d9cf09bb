"""The ``@tool`` decorator: a method, its JSON schema, and the reading of what a model passes to it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from infra.errors import UsageError
from infra.inference.messages import ToolSchema

P = ParamSpec("P")
R = TypeVar("R")

MAX_NAME_ECHO = 64
"""Most characters of a model-written argument name that are repeated in an error."""


class ToolError(Exception):
    """Raised by a tool to tell the model that its request was refused; ``code`` becomes ``{"error": code}``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=False)


class _PlainSchema(GenerateJsonSchema):
    """JSON schema without pydantic's generated titles, which cost prompt tokens and say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class Tool(Generic[P, R]):
    """A method that the model may call. Used on an instance it is that method, unchanged.

    Args:
        function: the method; every parameter after ``self`` needs a type hint.
        isolate: run a blocking method in a thread: others go on meanwhile, and even C code that never returns cannot
            hold the episode beyond ``timeout_s``.
        timeout_s: seconds for a call; the model is then answered ``timeout``.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], R], isolate: bool, timeout_s: float) -> None:
        self.function = function
        self.isolate = isolate
        self.timeout_s = timeout_s
        self.name = function.__name__
        self.is_async = inspect.iscoroutinefunction(function)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Tool[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> Tool[P, R] | Callable[P, R]:
        if instance is None:
            return self
        return self.function.__get__(instance, owner)  # type: ignore[no-any-return]  # a bound method

    @cached_property
    def schema(self) -> ToolSchema:
        """Name, docstring and JSON schema of the parameters.

        Raises:
            UsageError: a parameter has no type hint, or one without a JSON schema.
        """
        arguments = self._arguments
        try:
            parameters = arguments.model_json_schema(schema_generator=_PlainSchema)
        except Exception as error:
            raise self._unusable(f"its parameters have no JSON schema ({_first_line(error)})") from error
        parameters.pop("title", None)
        return ToolSchema(name=self.name, description=inspect.getdoc(self.function) or "", parameters=parameters)

    def read(self, arguments: str) -> dict[str, Any]:
        """Checked arguments from a model's JSON text; types are strict, as the schema promises.

        Raises:
            ToolError: ``bad_arguments``, ``missing_argument:NAME``, ``unexpected_argument:NAME``, ``type_error:NAME``
                or ``invalid_argument:NAME`` (right type, forbidden value).
        """
        try:
            model = self._arguments.model_validate_json(arguments if arguments.strip() else "{}")
        except ValidationError as error:
            raise ToolError(_error_code(error)) from None
        except UnicodeEncodeError:  # a lone surrogate
            raise ToolError("bad_arguments") from None
        return {name: model.__dict__[name] for name in self._names}

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self._arguments.model_fields)

    @cached_property
    def _arguments(self) -> type[BaseModel]:
        try:
            hints = typing.get_type_hints(self.function, include_extras=True)
        except NameError as error:
            raise self._unusable(f"its type hints cannot be read ({error})") from error
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(self.function).parameters.values())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise self._unusable(f"parameter {parameter} cannot be filled from a JSON object")
            if parameter.name not in hints:
                raise self._unusable(f"parameter {parameter.name} has no type hint")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        try:
            return create_model(self.name, __base__=_Arguments, **fields)
        except Exception as error:
            raise self._unusable(f"its parameters cannot be read from JSON ({_first_line(error)})") from error

    def _unusable(self, why: str) -> UsageError:
        code = self.function.__code__ if inspect.isfunction(self.function) else None
        return UsageError(
            f"tool {self.name} cannot be offered to a model: {why}",
            where=f"{code.co_filename}:{code.co_firstlineno}" if code else self.name,
            fix="give every parameter a type hint that pydantic can read from JSON (str, int, list[str], a model, …)",
        )


@overload
def tool(function: Callable[Concatenate[Any, P], R], /) -> Tool[P, R]: ...
@overload
def tool(
    *, isolate: bool = False, timeout_s: float = 30.0
) -> Callable[[Callable[Concatenate[Any, P], R]], Tool[P, R]]: ...
def tool(
    function: Callable[Concatenate[Any, P], R] | None = None, /, *, isolate: bool = False, timeout_s: float = 30.0
) -> Tool[P, R] | Callable[[Callable[Concatenate[Any, P], R]], Tool[P, R]]:
    """Offer a method of a :class:`~domain_rewards.environments.base.ToolEnvironment` to the model.

    A plain method runs inline, which is fast and cannot be interrupted; an ``async`` method, or a plain one with
    ``isolate=True`` (its own thread), is given ``timeout_s`` seconds.
    """

    def wrap(method: Callable[Concatenate[Any, P], R]) -> Tool[P, R]:
        return Tool(method, isolate, timeout_s)

    return wrap if function is None else wrap(function)


def collect(namespaces: tuple[type, ...]) -> Mapping[str, Tool[..., Any]]:
    """Tools along a class's method resolution order, base classes first; an override replaces what it hides."""
    found: dict[str, Any] = {}
    for owner in reversed(namespaces):
        found |= vars(owner)
    return {name: value for name, value in found.items() if isinstance(value, Tool)}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _error_code(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])[:MAX_NAME_ECHO]
    kind = first["type"]
    if not path:
        return "bad_arguments"
    if kind == "missing":
        return f"missing_argument:{path}"
    if kind == "extra_forbidden":
        return f"unexpected_argument:{path}"
    if kind.endswith(("_type", "_parsing")):
        return f"type_error:{path}"
    return f"invalid_argument:{path}"
