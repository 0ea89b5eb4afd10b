"""A flame graph: one HTML page, which loads nothing."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

SMALLEST = 0.0005
"""The least part of the whole that is drawn."""


@dataclass
class Frame:
    """A part of what took time, and the parts inside of it, by name."""

    name: str
    seconds: float = 0.0
    inside: dict[str, Frame] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], seconds: float) -> None:
        """Seconds of the part that these names lead to."""
        self.seconds += seconds
        if names:
            self.inside.setdefault(names[0], Frame(names[0])).add(names[1:], seconds)


def page(root: Frame) -> str:
    """A page of a whole. What is wider took longer; what stands below is a part of what is above."""
    return _PAGE.replace("TITLE", html.escape(root.name)).replace("FRAMES", _drawn(root, root.seconds, root.seconds))


def _drawn(frame: Frame, around: float, whole: float) -> str:
    """A frame and what is inside of it, as wide as its part of what is `around` it."""
    if not whole or frame.seconds < SMALLEST * whole:
        return ""
    told = f"{frame.name}: {1000 * frame.seconds:,.3f} ms, {100 * frame.seconds / whole:.1f} %"
    width, color = 100 * frame.seconds / around, 20 + sum(frame.name.encode()) % 35
    parts = sorted(frame.inside.values(), key=lambda part: -part.seconds)
    return (
        f'<div class="frame" style="width:{width:.3f}%"><p style="background:hsl({color} 80% 70%)" '
        f'title="{html.escape(told)}">{html.escape(frame.name)}</p>'
        f"{''.join(_drawn(part, frame.seconds, whole) for part in parts)}</div>"
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
