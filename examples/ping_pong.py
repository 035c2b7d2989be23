"""Ping-pong: two meshes of actors call each other, with one ball in play for each pair.

A player returns a ball with `broadcast`, which sends and does not wait. A player must not wait for
the opponent's answer: an actor handles one message at a time, so a waiting player could never
receive the ball that comes back. Each message carries a port along with the ball. The player who
hits the ball last reports through that port to the program that served the ball.

    python examples/ping_pong.py --pairs 2 --hits 2000
"""

import argparse
import sys
import time

from monarch.actor import Actor, Channel, Port, context, current_rank, endpoint, this_host


class Player(Actor):
    """A player that returns every ball to the player of the same rank in the other mesh."""

    def __init__(self) -> None:
        self.hits = 0

    @endpoint
    def meet(self, opponents: "Player") -> None:
        self.opponent = opponents.slice(**current_rank())

    @endpoint
    def hit(self, pair: int, hits_left: int, finished: Port[int]) -> None:
        self.hits += 1
        if hits_left == 1:
            me = context().actor_instance  # (current_rank() is that in the slice that was called)
            print(f"Pong!, Receiver ({me.name}:{me.rank.rank}) received msg: ball {pair}, last hit")
            finished.send(pair)
        else:
            self.opponent.hit.broadcast(pair, hits_left - 1, finished)

    @endpoint
    def score(self) -> int:
        return self.hits


def main() -> int:
    parser = argparse.ArgumentParser(description="Two meshes of actors call each other.")
    parser.add_argument("--pairs", type=int, default=2, help="players in each mesh (default: 2)")
    parser.add_argument("--hits", type=int, default=2000, help="hits per ball (default: 2000)")
    args = parser.parse_args()
    if args.pairs < 1 or args.hits < 1:
        parser.error("--pairs and --hits must be at least 1")

    left_procs = this_host().spawn_procs({"pair": args.pairs})
    right_procs = this_host().spawn_procs({"pair": args.pairs})
    left = left_procs.spawn("left", Player)
    right = right_procs.spawn("right", Player)
    left.meet.call(right).get()
    right.meet.call(left).get()

    start = time.perf_counter()
    finished, receiver = Channel[int].open()
    for pair in range(args.pairs):
        left.slice(pair=pair).hit.broadcast(pair, args.hits, finished)
    for _ in range(args.pairs):
        pair = receiver.recv().get()
        print(f"pair {pair} has finished after {time.perf_counter() - start:.2f} s", flush=True)
    seconds = time.perf_counter() - start

    hits = [*left.score.call().get().values(), *right.score.call().get().values()]
    print(f"hits by the left mesh {hits[: args.pairs]}, by the right mesh {hits[args.pairs :]}")
    print(f"{sum(hits)} hits, {sum(hits) / seconds:,.0f} a second")

    left_procs.stop().get()
    right_procs.stop().get()
    if sum(hits) != args.pairs * args.hits:
        print("error: a hit was lost", file=sys.stderr)
        return 1
    print("Example completed successfully!")
    return 0


if __name__ == "__main__":
    sys.exit(main())
