"""The outcomes of ``make zoo``, as a page: ``docs/zoo.md``.

::

    python tools/docs/zoo_page.py                        # to standard output
    python tools/docs/zoo_page.py --write docs/zoo.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import format_table, wrap, write_page

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "zoo.json"

TABLES = {
    "Over the tensors and tokens of a model": ["tensor", "generate", "experts", "context"],
    "Over its parameters and layers": ["FSDP generate", "pipeline", "compile", "checkpoint"],
}

_HEAD = """# Models of others, distributed

Written by `make zoo`, which stores its outcomes in `zoo.json`; a test compares the two.

Tiny models of random weights, most of them of Hugging Face's transformers, distributed over two
ranks that are processes, and compared with the same model in one process, in float64. The
models are not changed. torch {torch}, transformers {transformers}, on the CPU.

- *tensor*: `fd.parallelize(model, mesh, "auto")`, three steps of AdamW with clipping.
- *generate*: texts under that plan: greedy, sampled with a seed, and by beams.
- *experts*: `fd.ExpertParallel()` for the experts, three steps as above.
- *context*: `fd.context_parallel`, by the ring and by Ulysses: the loss and all gradients.
- *FSDP generate*: texts in `fd.FSDP` after `fd.register_forward_method(fsdp, "generate")`, each
  rank with prompts of its own.
- *pipeline*: `fd.split_model(model, 2)`, three steps of AdamW with two microbatches.
- *compile*: `fd.FSDP` of a model after `model.compile(backend="eager")`, three steps with
  clipping. That backend runs the graphs that torch.compile captures as they are.
- *checkpoint*: saved from two ranks by tensor parallelism and by FSDP, each loaded into the
  other, FSDP over three ranks, and exported to a folder from which transformers loads the model.

A figure is the largest difference of losses and parameters after the last step, each relative
to its tensor's largest element; up to 1e-05 it is *ok*, since transformers computes some steps
in float32, such as its norms and routers. *ok* alone is no difference. A dash means that there
is nothing to distribute. The numbers in brackets lead to the reasons below.
"""


def render() -> str:
    """Render the page."""
    stored: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    reasons: list[str] = []
    parts = [_HEAD.format(torch=stored["torch"], transformers=stored["transformers"])]
    parts += [f"## {title}\n\n{_table(columns, stored['cells'], reasons)}" for title, columns in TABLES.items()]
    notes = [wrap(f"{number}. {_escaped(reason)}", "   ") for number, reason in enumerate(reasons, 1)]
    return "\n".join([*parts, "## Reasons\n", *notes, ""])


def _table(columns: Sequence[str], cells: dict[str, dict[str, Any]], reasons: list[str]) -> str:
    rows = [[family, *[_cell(found.get(column), reasons) for column in columns]] for family, found in cells.items()]
    return format_table(["", *columns], rows)


def _cell(found: dict[str, Any] | None, reasons: list[str]) -> str:
    """The text of a cell; its reason joins the others."""
    if found is None:
        return "not run"
    kind, error = found["outcome"], found.get("error", 0.0)
    text = "-" if kind == "not applicable" else f"{error:.0e}" if kind == "ok" and error else kind
    reason = found.get("reason")
    if not reason:
        return text
    if reason not in reasons:
        reasons.append(reason)
    return f"{text} [{reasons.index(reason) + 1}]"


def _escaped(text: str) -> str:
    """Text in which Markdown sees no emphasis and no links."""
    return "".join(f"\\{each}" if each in "*_[]<>`" else each for each in text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page to where the command line says."""
    write_page("tools/docs/zoo_page.py", render, arguments)


if __name__ == "__main__":
    main()
