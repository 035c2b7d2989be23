"""A flame graph as one SVG file, which a browser shows and searches without anything else. Pure.

Each frame is a rectangle whose width is its share of the time, above it those that it called. A
click on a frame makes it as wide as the picture, a click on the background shows all again. Ctrl-F
or `/` searches by a regular expression, and says which share of the time it is about. Frames that
would be narrower than a third of a pixel are left out; their share is part of the frame below.
"""

from __future__ import annotations

import html
import json
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from monarch._traces.sampler import ENGINE
from monarch._traces.stacks import Frame, Profile

__all__ = ["flame_graph"]

_WIDTH = 1200
_ROW = 18
_TOP = 64
_LEAST = 0.3  # pixels
_LAST = "\ufffd"  # further characters are not all allowed in XML

_STYLE = """
svg { background: #fff; color: #1b1f24; font: 12px system-ui, sans-serif; }
text { fill: currentColor; } .f { cursor: pointer; } .f rect { stroke: #fff; stroke-width: .5; }
.f text { fill: #1b1f24; pointer-events: none; font-family: ui-monospace, monospace; }
.f:hover rect { stroke: #000; stroke-width: 1.5; } .hit rect { fill: #d33bd3; }
.dim { opacity: .45; } .b { cursor: pointer; text-decoration: underline; }
@media (prefers-color-scheme: dark) {
  svg { background: #16181d; color: #e4e7eb; } .f rect { stroke: #16181d; }
  .f:hover rect { stroke: #fff; }
}
"""

_SCRIPT = """
(function () {
  var svg = document.documentElement, W = %(width)s, total = %(total)s, unit = %(unit)s;
  var all = Array.prototype.slice.call(svg.querySelectorAll('.f'));
  var about = svg.querySelector('#about'), found = svg.querySelector('#found'), first = all[0];
  function num(g, name) { return +g.getAttribute('data-' + name); }
  function describe(g) {
    var w = num(g, 'w');
    return g.getAttribute('data-n') + ' - ' + (w / 1e9).toFixed(3) + ' s of ' + unit + ' time, '
      + (100 * w / total).toFixed(2) + ' %%';
  }
  function fit(g, width) {
    var text = g.querySelector('text'), room = Math.floor((width - 6) / 7.3);
    var name = g.getAttribute('data-n');
    if (name.length > room) name = name.slice(0, room - 1) + '\\u2026';
    text.textContent = room < 3 ? '' : name;
  }
  function zoom(to) {
    var x = num(to, 'x'), w = num(to, 'w'), d = num(to, 'd');
    all.forEach(function (g) {
      var gx = num(g, 'x'), gw = num(g, 'w'), gd = num(g, 'd');
      var above = gx >= x && gx + gw <= x + w && gd >= d;
      var below = gd < d && gx <= x && gx + gw >= x + w;
      g.style.display = above || below ? '' : 'none';
      if (!above && !below) return;
      var left = below ? 0 : (gx - x) / w * W, width = below ? W : gw / w * W;
      var rect = g.querySelector('rect');
      rect.setAttribute('x', left); rect.setAttribute('width', Math.max(width, .1));
      g.querySelector('text').setAttribute('x', left + 3);
      g.classList.toggle('dim', below); fit(g, width);
    });
  }
  function search(text) {
    var test = null;
    if (text) { try { test = new RegExp(text, 'i'); } catch (error) {
      found.textContent = 'not a regular expression: ' + text; return; } }
    var hits = [];
    all.forEach(function (g) {
      var hit = !!test && g !== first && test.test(g.getAttribute('data-n'));
      g.classList.toggle('hit', hit);
      if (hit) hits.push([num(g, 'x'), num(g, 'w'), num(g, 'd')]);
    });
    hits.sort(function (a, b) { return a[0] - b[0] || a[2] - b[2]; });
    var end = -1, sum = 0;
    hits.forEach(function (hit) {
      if (hit[0] >= end) { sum += hit[1]; end = hit[0] + hit[1]; }
    });
    found.textContent = test ? text + ': ' + (100 * sum / total).toFixed(1) + ' %%' : '';
  }
  function ask() { search(prompt('Search for a regular expression:', '') || ''); }
  all.forEach(function (g) {
    g.addEventListener('click', function (event) { event.stopPropagation(); zoom(g); });
    g.addEventListener('mouseenter', function () { about.textContent = describe(g); });
    g.addEventListener('mouseleave', function () { about.textContent = ''; });
  });
  svg.addEventListener('click', function () { zoom(first); });
  svg.querySelector('#ask').addEventListener('click', function (event) {
    event.stopPropagation(); ask(); });
  window.addEventListener('keydown', function (event) {
    if (event.key === '/' || (event.key === 'f' && (event.ctrlKey || event.metaKey))) {
      event.preventDefault(); ask();
    } else if (event.key === 'Escape') { search(''); zoom(first); }
  });
})();
"""


class _Box(NamedTuple):
    frame: Frame
    depth: int
    start: int
    weight: int


def flame_graph(profile: Profile) -> str:
    """Return the SVG of a profile."""
    total = profile.stacks.total
    least = total * _LEAST / _WIDTH
    boxes = [_Box(Frame("all", "", 0), 0, 0, total)]
    boxes += [box for box in _boxes(profile) if box.weight >= least]
    rows = 1 + max(box.depth for box in boxes)
    height = _TOP + rows * _ROW + 12
    script = _SCRIPT % {
        "width": _WIDTH,
        "total": json.dumps(max(1, total)),
        "unit": json.dumps(profile.unit),
    }
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n',
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
        f' width="{_WIDTH}" height="{height}">\n<style>{_STYLE}</style>\n',
        f'<text x="8" y="22" font-size="15">{html.escape(profile.title())}</text>\n',
        '<text id="about" x="8" y="46"></text>\n',
        f'<text id="found" x="{_WIDTH - 8}" y="46" text-anchor="end"></text>\n',
        f'<text id="ask" class="b" x="{_WIDTH - 8}" y="22" text-anchor="end">search</text>\n',
        *(_drawn(box, total, rows) for box in boxes),
        f"<script><![CDATA[{script}]]></script>\n</svg>\n",
    ]
    return "".join(parts)


def _boxes(profile: Profile) -> Iterator[_Box]:
    """Yield the rectangles of all frames, parents first in each column."""
    open_: list[tuple[Frame, int, int]] = []  # frame, start, weight until now
    at = 0
    for stack, weight in profile.stacks.rows():
        same = 0
        while same < min(len(open_), len(stack)) and open_[same][0] == stack[same]:
            same += 1
        while len(open_) > same:
            frame, start, sum_ = open_.pop()
            yield _Box(frame, len(open_) + 1, start, sum_)
        open_ = [(frame, start, sum_ + weight) for frame, start, sum_ in open_]
        open_ += [(frame, at, weight) for frame in stack[same:]]
        at += weight
    while open_:
        frame, start, sum_ = open_.pop()
        yield _Box(frame, len(open_) + 1, start, sum_)


def _drawn(box: _Box, total: int, rows: int) -> str:
    whole = max(1, total)
    x, width = box.start / whole * _WIDTH, box.weight / whole * _WIDTH
    y = _TOP + (rows - 1 - box.depth) * _ROW
    name = str(box.frame)
    room = int((width - 6) / 7.3)
    shown = "" if room < 3 else name if len(name) <= room else name[: room - 1] + "…"
    file = f"\n{box.frame.file}" if box.frame.file else ""
    title = f"{name}{file}\n{box.weight / 1e9:.3f} s, {100 * box.weight / whole:.2f} %"
    return (
        f'<g class="f" data-x="{box.start}" data-w="{box.weight}" data-d="{box.depth}" '
        f'data-n="{_text(name)}"><title>{_text(title)}</title>'
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.1):.2f}" height="{_ROW - 1}" rx="2" '
        f'fill="{_colour(box.frame)}"/>'
        f'<text x="{x + 3:.2f}" y="{y + 13}">{_text(shown)}</text></g>\n'
    )


def _text(text: str) -> str:
    """Return a text for XML, which has no other control characters than these."""
    known = text.encode(errors="replace").decode()
    return html.escape("".join(c if " " <= c <= _LAST or c == "\n" else "?" for c in known))


def _colour(frame: Frame) -> str:
    if frame.name == ENGINE:
        return "#b8bcc4"
    if not frame.file:
        return "#9cc5e8"
    hue = 12 + zlib.crc32(frame.file.encode(errors="replace")) % 44
    light = 62 + zlib.crc32(frame.name.encode(errors="replace")) % 14
    return f"hsl({hue} 85% {light}%)"
