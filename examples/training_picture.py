"""A picture of a training with replicas: loss, membership and lost work over time.

`Picture` makes lines of text for a terminal out of `Replicas.events`, and, with matplotlib, a file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.training import Event

BARS = " ▁▂▃▄▅▆▇█"
HEIGHT = 5  # lines of text for the loss
LEFT = 11  # characters before the first column


@dataclass(frozen=True)
class Kill:
    """A kill of a "rank" or a "host": when, and which ranks."""

    seconds: float
    what: str
    ranks: tuple[int, ...]


def lost_steps(event: Event) -> int:
    """Return how many steps of work were thrown away: a step that was tried, or committed ones."""
    return int(event.kind == "abort") + event.rolled_back


class Picture:
    """The course of a training so far. Each group has one rank, so the two have one number.

    Args:
        groups: the number of replica groups.
        events: see `Replicas.events`.
        kills: all so far, the oldest first.
        seconds: the time of the picture, on the clock of the events.
    """

    def __init__(
        self, groups: int, events: Sequence[Event], kills: Sequence[Kill], seconds: float
    ) -> None:
        self.groups, self.events, self.kills = groups, events, kills
        self.commits = [event for event in events if event.kind == "commit"]
        self.origin = self.commits[0].seconds if self.commits else 0.0
        self.seconds = max(seconds - self.origin, 1e-9)  # the first step begins the picture

    def lines(self, width: int = 60) -> list[str]:
        """Return the picture as text, `width` columns of time wide."""
        rows = [[" "] * width for _ in range(self.groups)]
        counts = [0] * width
        losses: list[list[float]] = [[] for _ in range(width)]
        present: list[list[int]] = [[0] * width for _ in range(self.groups)]
        for event in self.commits:
            column = self.column(event.seconds, width)
            counts[column] += 1
            if event.report is not None:
                losses[column].append(event.report)
            for group in event.groups:
                present[group][column] += 1
        for group, row in enumerate(rows):
            for column, count in enumerate(counts):
                if count:
                    part = present[group][column] / count
                    row[column] = "█" if part == 1 else "▒" if part else "·"
        for kill in self.kills:
            for rank in kill.ranks:
                rows[rank][self.column(kill.seconds, width)] = "x"
        lost = [0] * width
        for event in self.events:
            lost[self.column(event.seconds, width)] += lost_steps(event)
        return [
            *self.curve([sum(each) / len(each) if each else None for each in losses]),
            *(f"{f'group {group}':>{LEFT - 2}} |{''.join(row)}" for group, row in enumerate(rows)),
            f"{'lost':>{LEFT - 2}} |{''.join(str(min(n, 9)) if n else ' ' for n in lost)}",
            f"{'':{LEFT}}{'0 s':<{width // 2}}{f'{self.seconds:.0f} s':>{width - width // 2}}",
        ]

    def column(self, seconds: float, width: int) -> int:
        return max(0, min(width - 1, int((seconds - self.origin) / self.seconds * width)))

    @staticmethod
    def curve(values: list[float | None]) -> list[str]:
        """Draw the losses as bars, on a logarithmic scale."""
        known = [math.log(max(value, 1e-6)) for value in values if value is not None]
        low, high = (min(known), max(known)) if known else (0.0, 0.0)
        steps = HEIGHT * (len(BARS) - 1)
        levels = [
            0
            if value is None
            else 1 + round((math.log(max(value, 1e-6)) - low) / ((high - low) or 1) * (steps - 1))
            for value in values
        ]
        lines = []
        for line in range(HEIGHT - 1, -1, -1):
            bars = [BARS[max(0, min(8, level - 8 * line))] for level in levels]
            label = {HEIGHT - 1: math.exp(high), 0: math.exp(low)}.get(line)
            text = "" if label is None or not known else f"{label:.3g}"
            lines.append(f"{'loss' if line == HEIGHT // 2 else text:>{LEFT - 2}} |{''.join(bars)}")
        return lines

    def draw(self, path: Path) -> None:
        """Write the picture to a file (.png, .svg, ...) with matplotlib."""
        import matplotlib as mpl

        mpl.use("Agg")  # draws to a file and needs no display
        from matplotlib import pyplot as plt

        figure, (loss, members, work) = plt.subplots(
            3, figsize=(8, 6), sharex=True, layout="constrained", height_ratios=[3, 1.5, 1]
        )
        times = [event.seconds - self.origin for event in self.commits]
        loss.semilogy(times, [event.report for event in self.commits], linewidth=0.7)
        loss.set(ylabel="training loss")
        for group in range(self.groups):
            members.broken_barh(self.spans(group), (group - 0.4, 0.8))
        for kill in self.kills:
            members.plot(
                [kill.seconds - self.origin] * len(kill.ranks), kill.ranks, "x", color="black"
            )
        members.set(ylabel="replica group", yticks=range(self.groups))
        total, moments, sums = 0, [0.0], [0]
        for event in self.events:
            if lost_steps(event):
                total += lost_steps(event)
                moments.append(event.seconds - self.origin)
                sums.append(total)
        work.step([*moments, self.seconds], [*sums, total], where="post", color="tab:red")
        work.set(xlabel="seconds", ylabel="lost steps")
        figure.savefig(path, dpi=120)
        plt.close(figure)

    def spans(self, group: int) -> list[tuple[float, float]]:
        """Return the times in which a group took part: beginning and duration of each."""
        found: list[tuple[float, float]] = []
        last, inside = 0.0, False
        for event in self.commits:
            now = event.seconds - self.origin
            if group in event.groups:
                start = found.pop()[0] if inside else last
                found.append((start, now - start))
            inside = group in event.groups
            last = now
        return found
