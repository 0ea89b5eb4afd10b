"""Flame graph of the time of a run, as a self-contained HTML page."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

# Frames with a smaller share of the run are not drawn: they would be thinner than a pixel.
MIN_FRAME_SHARE = 0.0005


@dataclass
class Frame:
    """A node of the flame graph: its seconds, and the frames inside it by name."""

    name: str
    seconds: float = 0.0
    children: dict[str, Frame] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], seconds: float) -> None:
        """Add seconds to this frame and to the frames along the path `names` inside it."""
        self.seconds += seconds
        if names:
            self.children.setdefault(names[0], Frame(names[0])).add(names[1:], seconds)


def flame_graph_page(root: Frame) -> str:
    """Return the HTML page of a frame. Wider frames took longer, and frames below another are parts of it."""
    return _PAGE.replace("TITLE", html.escape(root.name)).replace(
        "FRAMES", _frame_html(root, root.seconds, root.seconds)
    )


def _frame_html(frame: Frame, parent_seconds: float, run_seconds: float) -> str:
    """Return the HTML of a frame and the frames inside it.

    Args:
        frame: the frame.
        parent_seconds: the seconds of the frame that contains it, which its width is relative to.
        run_seconds: the seconds of the run.
    """
    if not run_seconds or frame.seconds < MIN_FRAME_SHARE * run_seconds:
        return ""
    tooltip = f"{frame.name}: {1000 * frame.seconds:,.3f} ms, {100 * frame.seconds / run_seconds:.1f} %"
    width, color = 100 * frame.seconds / parent_seconds, 20 + sum(frame.name.encode()) % 35
    parts = sorted(frame.children.values(), key=lambda part: -part.seconds)
    return (
        f'<div class="frame" style="width:{width:.3f}%"><p style="background:hsl({color} 80% 70%)" '
        f'title="{html.escape(tooltip)}">{html.escape(frame.name)}</p>'
        f"{''.join(_frame_html(part, frame.seconds, run_seconds) for part in parts)}</div>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title><style>
body { font: 13px sans-serif; margin: 1em; }
.frame { float: left; box-sizing: border-box; min-width: 0; }
.frame > p { margin: 0 1px 1px 0; padding: 2px 3px; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }
</style></head><body>
<p>Wider is longer; below is what it consists of. The pointer shows the milliseconds.</p>
FRAMES
</body></html>
"""
