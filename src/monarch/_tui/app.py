"""The screen: a header, the tree, the details of the selected node, and the keys; by textual.

The API is asked on a worker thread, one request at a time, so the screen answers keys also while
the server is slow. Rows are drawn as they become visible, so 10,000 actors cost as much as those on
the screen. All texts of the job are drawn as plain text, never as markup.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from typing import Any, ClassVar, cast

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import worker as workers
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.theme import Theme
from textual.widgets import Static

from monarch._tui import checks
from monarch._tui.client import Client, Lost, Refused
from monarch._tui.details import details, glossary, settings_lines, stack_lines
from monarch._tui.tree import Node, Tree, duration
from monarch._tui.words import Words, cells, columns

__all__ = ["Tui"]

_LIGHT = Theme(
    name="doom-nord-light",
    primary="#3b6ea8",
    secondary="#842879",
    warning="#9a7500",
    error="#99324b",
    success="#4f894c",
    accent="#398eac",
    foreground="#3b4252",
    background="#e5e9f0",
    surface="#d8dee9",
    panel="#d8dee9",
    dark=False,
)
_COLOURS = {
    "busy": "green",
    "waiting": "yellow",
    "stuck": "dark_orange",
    "silent": "magenta",
    "failed": "red",
    "stopped": "bright_black",
    "starting": "cyan",
    "stopping": "cyan",
}
_PAGE = 10  # rows


class _TreeView(ScrollView, can_focus=True):
    """The visible rows of a tree."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree

    def show(self) -> None:
        """Draw the rows of the tree anew, after they have changed."""
        width = max(
            (_width(row.depth, row.node, row.summary) for row in self._tree.rows), default=1
        )
        self.virtual_size = Size(width, len(self._tree.rows))
        self.follow()

    def follow(self) -> None:
        """Draw anew with the selected row in view."""
        self.refresh()
        if self._tree.rows:
            line = Region(0, self._tree.place, 1, 1)
            self.scroll_to_region(line, animate=False, x_axis=False)

    def to_top(self) -> None:
        """Scroll so that the selected row is the first."""
        self.scroll_to(y=self._tree.place, animate=False)

    def render_line(self, y: int) -> Strip:
        """Draw one line of the screen."""
        left, top = self.scroll_offset
        number = top + y
        base = self.rich_style
        if number >= len(self._tree.rows):
            return Strip.blank(self.size.width, base)
        row = self._tree.rows[number]
        mark = {True: "▼ ", False: "▶ ", None: "  "}[row.is_open]
        colour = Style(color=_COLOURS.get(row.node.state))
        segments = [
            Segment("  " * row.depth + mark, base),
            Segment(row.node.label, base + colour),
        ]
        if row.summary:
            segments.append(Segment(f"  {row.summary}", base + Style(dim=True)))
        if row.node.about:
            segments.append(Segment(f"  {row.node.about}", base + colour))
        strip = Strip(segments).crop_extend(left, left + self.size.width, base)
        if number == self._tree.place:
            strip = strip.apply_style(Style(reverse=True))
        return strip


def _width(depth: int, node: Node, summary: str) -> int:
    return 2 * depth + 6 + sum(map(cells, (node.label, summary, node.about)))


class _Overlay(ModalScreen[None]):
    """Lines over the screen: what a key asked for, from the server or at hand."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
        Binding("pagedown,ctrl+d", "scroll(10)", show=False),
        Binding("pageup,ctrl+u", "scroll(-10)", show=False),
    ]

    def __init__(
        self, title: str, hint: str, fetch: Callable[[], list[str]], keys: str, waiting: str
    ) -> None:
        super().__init__()
        self._heading = title
        self._hint = hint
        self._fetch = fetch
        self._again = keys
        self._waiting = waiting

    def compose(self) -> ComposeResult:
        """Make the box."""
        with VerticalScroll(id="box") as box:
            box.border_title = Text(self._heading)
            box.border_subtitle = self._hint
            yield Static(Text(self._waiting), id="lines")

    def on_mount(self) -> None:
        """Ask at once."""
        self._ask()

    def on_key(self, event: Any) -> None:
        """Ask again by the key that has opened it, or ``r``."""
        if event.key in self._again or event.character in tuple(self._again):
            event.stop()
            self._ask()

    def action_scroll(self, lines: int) -> None:
        """Scroll by so many lines."""
        self.query_one("#box", VerticalScroll).scroll_relative(y=lines, animate=False)

    def _ask(self) -> None:
        self.query_one("#lines", Static).update(Text(self._waiting))
        self.run_worker(self._run, thread=True, exclusive=True)

    def _run(self) -> None:
        try:
            lines = self._fetch()
        except (Lost, Refused) as error:
            lines = [str(error)]
        worker = _worker()
        if not worker.is_cancelled:
            text = Text("\n".join(lines))
            app = cast("App[None]", self.app)  # pyright: ignore[reportUnknownMemberType]
            app.call_from_thread(self._put, text)

    def _put(self, text: Text) -> None:
        if self.is_mounted:
            self.query_one("#lines", Static).update(text)


class Tui(App[None]):
    """The terminal interface; `run` blocks until the user quits.

    Args:
        client: where the facts come from.
        refresh: seconds between two looks.
        theme: a theme of textual, or ``"doom-nord-light"``.
        words: the texts of the language.
    """

    TITLE = "mesh-admin"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: 2; padding: 0 1; background: $panel; }
    #tree { width: 1fr; }
    #details { width: 1fr; border-left: solid $primary; padding: 0 1; }
    #hints { height: 1; padding: 0 1; background: $panel; }
    .narrow #details { display: none; }
    _Overlay { align: center middle; }
    #box { width: 90%; height: 85%; border: round $primary; background: $surface; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", show=False),
        Binding("k,up", "move(-1)", show=False),
        Binding("g,home", "move(-1000000000)", show=False, priority=True),
        Binding("G,end", "move(1000000000)", show=False, priority=True),
        Binding("pagedown,ctrl+d,ctrl+v", f"move({_PAGE})", show=False, priority=True),
        Binding("pageup,ctrl+u,alt+v", f"move({-_PAGE})", show=False, priority=True),
        Binding("tab,enter,space", "expand", show=False, priority=True),
        Binding("right,l", "open(True)", show=False),
        Binding("left", "open(False)", show=False),
        Binding("c", "collapse", show=False),
        Binding("ctrl+l", "to_top", show=False),
        Binding("s", "system", show=False),
        Binding("h", "stopped", show=False),
        Binding("p", "stacks", show=False),
        Binding("C", "settings", show=False),
        Binding("question_mark", "glossary", show=False),
        Binding("d", "diagnose", show=False),
        Binding("q,ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(
        self, client: Client, *, refresh: float = 2.0, theme: str = "nord", words: Words
    ) -> None:
        super().__init__()
        self._client = client
        self._every = refresh
        self._words = words
        self._wanted_theme = theme
        self._tree = Tree()
        self._about: dict[str, Any] = {}
        self._problem = ""
        self._looked: float | None = None
        self._detailed = ""  # the reference of the node whose details are shown

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(id="header")
        with Horizontal():
            view = _TreeView(self._tree)
            view.id = "tree"
            yield view
            with VerticalScroll(id="details", can_focus=False):
                yield Static(id="node")
        yield Static(id="hints")

    def on_mount(self) -> None:
        """Begin to look."""
        self.register_theme(_LIGHT)
        self.theme = self._wanted_theme
        self.query_one("#hints", Static).update(
            Text(self._hints(), no_wrap=True, overflow="ellipsis")
        )
        self._header()
        self._look()
        self.set_interval(self._every, self._look)

    def on_resize(self, event: Any) -> None:
        """Leave the details out on a narrow screen; they come back on a wider one."""
        self.screen.set_class(event.size.width < 60, "narrow")

    # -- looking -----------------------------------------------------------------------------------

    def _look(self) -> None:
        self.run_worker(self._fetch, thread=True, exclusive=True, group="look")

    def _fetch(self) -> None:
        worker = _worker()
        try:
            about = self._client.get("/api/about")
            processes = self._client.get("/api/processes?limit=10000")
            grid = self._client.get("/api/grid")
        except (Lost, Refused) as error:
            if not worker.is_cancelled:
                self.call_from_thread(self._lose, str(error))
            return
        if not worker.is_cancelled:
            self.call_from_thread(self._take, about, processes, grid)

    def _lose(self, problem: str) -> None:
        self._problem = problem
        self._header()

    def _take(self, about: dict[str, Any], found: dict[str, Any], grid: dict[str, Any]) -> None:
        self._problem = ""
        self._about = about
        self._looked = time.monotonic()
        self._tree.update(found["hosts"], found["processes"], grid)
        self._draw()

    def _draw(self) -> None:
        """Show the tree after its rows have changed."""
        self.query_one("#tree", _TreeView).show()
        self._show_selected()

    def _show_selected(self) -> None:
        self._header()
        self._ask_details()

    def _ask_details(self) -> None:
        node = self._tree.selected
        if node is None:
            return
        if node.reference != self._detailed:
            self._detailed = node.reference
            self.query_one("#node", Static).update(Text(node.label, style="bold"))
            self.query_one("#details", VerticalScroll).scroll_home(animate=False)
        self.run_worker(
            lambda: self._fetch_details(node.reference),
            thread=True,
            exclusive=True,
            group="details",
        )

    def _fetch_details(self, reference: str) -> None:
        worker = _worker()
        try:
            node = self._client.get(f"/v1/{urllib.parse.quote(reference, safe='')}")
            text = _drawn(details(node, self._words))
        except Refused as error:
            text = Text(str(error))
        except Lost:
            return  # the header says so
        if not worker.is_cancelled:
            self.call_from_thread(self._put_details, reference, text)

    def _put_details(self, reference: str, text: Text) -> None:
        if reference == self._detailed:
            self.query_one("#node", Static).update(text)

    # -- the lines around --------------------------------------------------------------------------

    def _header(self) -> None:
        words = self._words
        parts = ["mesh-admin", self._client.url]
        if self._about:
            up = (self._about["now_us"] - self._about["started_at_us"]) / 1e6
            parts += [f"{words('up')}: {duration(up)}", f"@{self._about['user']}"]
        on, off = words("on"), words("off")
        parts.append(f"{words('sys')}:{on if self._tree.shows_system else off}")
        parts.append(f"{words('stopped')}:{on if self._tree.shows_stopped else off}")
        parts.append(f"⟳ {self._every:g}s")
        text = Text(" • ".join(parts), no_wrap=True, overflow="ellipsis")
        text.append("\n")
        if self._problem:
            since = (
                "" if self._looked is None else f" ({duration(time.monotonic() - self._looked)})"
            )
            text.append(f"{words('lost the server')}{since}: {self._problem}", style="bold red")
        elif (node := self._tree.selected) is not None:
            text.append(f"{node.label} {node.about}".rstrip())
        else:
            text.append(words("asking ...") if not self._about else words("nothing is selected"))
        self.query_one("#header", Static).update(text)

    def _hints(self) -> str:
        words = self._words
        pairs = (
            ("j/k", "move"),
            ("Tab", "expand"),
            ("q", "quit"),
            ("?", "help"),
            ("d", "diagnosis"),
            ("p", "stacks"),
            ("C", "settings"),
            ("s", "system actors"),
            ("h", "stopped actors"),
            ("c", "collapse all"),
        )
        return "  ".join(f"{key} {words(text)}" for key, text in pairs)

    # -- keys --------------------------------------------------------------------------------------

    def action_move(self, rows: int) -> None:
        """Select another row."""
        self._tree.move(rows)
        self.query_one("#tree", _TreeView).follow()
        self._show_selected()

    def action_expand(self) -> None:
        """Expand or collapse the selected row."""
        self._tree.toggle()
        self._draw()

    def action_open(self, is_open: bool) -> None:
        """Expand the selected row, or collapse it; then its parent."""
        self._tree.open(is_open=is_open)
        self._draw()

    def action_collapse(self) -> None:
        """Collapse all rows."""
        self._tree.collapse()
        self._draw()

    def action_to_top(self) -> None:
        """Scroll the selected row to the top."""
        self.query_one("#tree", _TreeView).to_top()

    def action_system(self) -> None:
        """Show or hide the actors of the system."""
        self._tree.show(system=not self._tree.shows_system)
        self._draw()

    def action_stopped(self) -> None:
        """Show or hide actors that have stopped."""
        self._tree.show(stopped=not self._tree.shows_stopped)
        self._draw()

    def action_stacks(self) -> None:
        """Show the stacks of the selected process, or that of the selected actor, by py-spy."""
        proc = self._selected_proc()
        if proc is not None:
            path = f"/v1/pyspy/{urllib.parse.quote(proc, safe='')}"
            self._over("stacks", lambda: stack_lines(self._client.get(path)), "pr")

    def action_settings(self) -> None:
        """Show the settings of the selected process."""
        proc = self._selected_proc()
        if proc is not None:
            path = f"/v1/config/{urllib.parse.quote(proc, safe='')}"
            self._over("settings", lambda: settings_lines(self._client.get(path)["entries"]), "Cr")

    def action_glossary(self) -> None:
        """Explain the fields of the selected node."""
        node = self._tree.selected
        kind = "host" if node is None else node.kind
        self._over("help", lambda: glossary(kind, self._words), "")

    def action_diagnose(self) -> None:
        """Probe the job, and show what answers."""
        self._over(
            "diagnosis", lambda: checks.report_lines(checks.diagnose(self._client.get)), "dr"
        )

    def _selected_proc(self) -> str | None:
        node = self._tree.selected
        if node is None or node.kind == "host":
            return None
        return node.reference if node.kind == "proc" else self._tree.parent_of(node.reference)

    def _over(self, title: str, fetch: Callable[[], list[str]], keys: str) -> None:
        words = self._words
        hint = f"Esc {words('close')}" + (f"  {keys[0]} {words('again')}" if keys else "")
        self.push_screen(_Overlay(words(title), hint, fetch, keys, words("asking ...")))


def _worker() -> Any:
    """Return the worker that runs this thread; it says whether it was cancelled."""
    found: Any = cast("Any", workers.get_current_worker())  # pyright: ignore[reportUnknownMemberType]
    return found


def _drawn(found: Any) -> Text:
    text = Text()
    text.append(f"{found.title}\n\n", style="bold")
    for name, value in columns(found.pairs):
        text.append(name, style="dim")
        text.append(f"{value}\n")
    for title, lines in found.panes:
        text.append(f"\n{title}\n", style="bold")
        for line in lines:
            text.append(f"{line}\n")
    return text
