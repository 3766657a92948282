"""Help text in panels, without Rich, which cuts long flags short in a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

PAIR, SPECULATION, NUMERICS, OUTPUT = "Pair", "Speculation", "Numerics and limits", "Output"
PROMPT, SAMPLING, ENDS, MACHINE = "Prompt", "Sampling", "Ends of an answer", "Machine"


class Panels(TyperCommand):
    """Lists each option under its rich_help_panel, in the order in which panels first come."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        parameters = self.get_params(ctx)
        rest = "Other" if any(map(_panel, parameters)) else "Options"
        for parameter in parameters:
            if (record := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                panel = "Arguments" if is_argument else _panel(parameter) or rest
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def _panel(parameter: Any) -> str | None:
    panel: str | None = getattr(parameter, "rich_help_panel", None)
    return panel
