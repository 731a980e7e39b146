"""The page that ``lowbit finetune --report`` writes: what training gained, by block and layer."""

from __future__ import annotations

from lowbit.finetuner.report import FinetuneReport
from lowbit.inspection.page import render_page


def render(report: FinetuneReport, model: str = "model") -> str:
    """The page, as text of one HTML document.

    Args:
        report: of a fine-tuning.
        model: what to call the model.
    """
    return render_page("finetune.html.j2", report=report, model=model)
