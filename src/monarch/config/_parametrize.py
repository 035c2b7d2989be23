"""Run a pytest test once per configuration.

The decorated test gets a parameter ``_config_overrides`` that pytest fills in, one dict of keys per
run, and its body runs inside ``configured(**overrides)``. The parameter is keyword-only, so that
the decorators work for functions and for methods alike.

pytest is imported when a decorator is applied and not before, since programs that use this library
may not have pytest.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

from monarch._engine.base.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["parametrize_config", "parametrize_config_pointwise"]

_Test: TypeAlias = "Callable[..., Any]"


def parametrize_config(**config_options: Iterable[Any]) -> Callable[[_Test], _Test]:
    """Run the test for every combination of the given values.

    Sets are taken in sorted order, so that every pytest worker collects the same list. Raises
    ``ValueError`` without any option.

    >>> @parametrize_config(prefix_with_rank={True, False}, tail_log_lines=[0, 10])
    ... def test_output(): ...
    >>> test_output.pytestmark[0].kwargs["ids"][0]
    'prefix_with_rank=False-tail_log_lines=0'
    """
    if not config_options:
        raise ValueError("parametrize_config requires at least one config option")
    columns = [_in_order(values) for values in config_options.values()]
    return _parametrize(tuple(config_options), itertools.product(*columns))


def parametrize_config_pointwise(**config_options: Iterable[Any]) -> Callable[[_Test], _Test]:
    """Run the test for the first value of every key, for the second of every key, and so on.

    Raises ``ValueError`` without any option, and if the keys have different numbers of values.
    """
    if not config_options:
        raise ValueError("parametrize_config_pointwise requires at least one config option")
    columns = {name: _in_order(values) for name, values in config_options.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "parametrize_config_pointwise requires every option to have the same number of "
            f"values; got lengths {lengths}"
        )
    return _parametrize(tuple(columns), zip(*columns.values(), strict=True))


def _in_order(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=str) if isinstance(values, set | frozenset) else list(values)


def _parametrize(
    names: tuple[str, ...], rows: Iterable[tuple[Any, ...]]
) -> Callable[[_Test], _Test]:
    runs = [dict(zip(names, row, strict=True)) for row in rows]
    ids = ["-".join(f"{name}={value}" for name, value in run.items()) for run in runs]

    def decorate(test: _Test) -> _Test:
        import inspect

        import pytest

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run_async(
                *args: Any, _config_overrides: dict[str, Any], **kwargs: Any
            ) -> Any:
                with settings.configured(**_config_overrides):
                    return await test(*args, **kwargs)

            wrapper: _Test = run_async
        else:

            @functools.wraps(test)
            def run(*args: Any, _config_overrides: dict[str, Any], **kwargs: Any) -> Any:
                with settings.configured(**_config_overrides):
                    return test(*args, **kwargs)

            wrapper = run

        # pytest reads from the signature which parameters a test has.
        signature = inspect.signature(test)
        extra = inspect.Parameter("_config_overrides", inspect.Parameter.KEYWORD_ONLY)
        parameters = list(signature.parameters.values())
        has_kwargs = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - has_kwargs, extra)
        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("_config_overrides", runs, ids=ids)(wrapper)

    return decorate
