"""Crawl a web site with several workers that share one queue.

The queue is an actor in this process: it hands out each address once and knows when there is no
work left. The workers, one per process, take an address, fetch the page, and report its links to
the queue, until the queue has no more work. The program serves an artificial site itself, so that
no request leaves the machine and the result can be checked.

    python examples/crawler.py --workers 4 --pages 200
"""

import argparse
import asyncio
import random
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.parse import urldefrag, urljoin
from urllib.request import urlopen

from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host, this_proc


@dataclass
class Page:
    url: str
    status: int
    title: str = ""
    links: list[str] = field(default_factory=list)


class Queue(Actor):
    """The addresses still to visit, and the pages seen so far, all on the site of `start`."""

    def __init__(self, start: str) -> None:
        self.site = start
        self.known = {start}
        self.waiting = deque([start])
        self.in_work = 0
        self.pages: list[Page] = []
        self.changed = asyncio.Condition()

    @concurrent_endpoint
    async def take(self) -> str | None:
        """Wait for the next address and return it; None when the whole site has been visited.

        The endpoint is concurrent, because a worker that waits here must not keep others from
        reporting pages.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self.waiting or not self.in_work)
            if not self.waiting:
                return None
            self.in_work += 1
            return self.waiting.popleft()

    @concurrent_endpoint
    async def report(self, page: Page) -> None:
        """Store a page that a worker has fetched, and queue its new addresses."""
        async with self.changed:
            self.in_work -= 1
            self.pages.append(page)
            new = {url for url in page.links if url.startswith(self.site)} - self.known
            self.known |= new
            self.waiting.extend(sorted(new))
            self.changed.notify_all()

    @endpoint
    async def progress(self) -> tuple[int, int]:
        """Return how many pages have been visited, and how many addresses are known."""
        return len(self.pages), len(self.known)

    @endpoint
    async def results(self) -> list[Page]:
        return self.pages


class Worker(Actor):
    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    @endpoint
    def crawl(self) -> int:
        """Visit pages until the queue has no more; return their number."""
        visited = 0
        while (url := self.queue.take.call_one().get()) is not None:
            self.queue.report.call_one(fetch(url)).get()
            visited += 1
        return visited


def fetch(url: str) -> Page:
    try:
        with urlopen(url, timeout=10) as response:  # noqa: S310 - the site is ours
            html = response.read().decode()
    except HTTPError as error:
        return Page(url, error.code)
    reader = LinkReader()
    reader.feed(html)
    links = [urldefrag(urljoin(url, link)).url for link in reader.links]
    return Page(url, 200, reader.title.strip(), links)


class LinkReader(HTMLParser):
    """A parser that collects the title and the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.title, self.in_title = "", False
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.in_title = tag == "title"
        if tag == "a" and (link := dict(attributes).get("href")):
            self.links.append(link)

    def handle_endtag(self, tag: str) -> None:
        self.in_title = False

    def handle_data(self, text: str) -> None:
        if self.in_title:
            self.title += text


class Site(ThreadingHTTPServer):
    """A web site of `pages` pages on a free local port. `hits` counts the requests for each page.

    Its links are as irregular as those of real sites: many links to each page, links into the
    middle of a page, links to other sites, and one to a page that does not exist.
    """

    def __init__(self, pages: int, delay: float) -> None:
        super().__init__(("127.0.0.1", 0), SiteHandler)
        self.pages, self.delay = pages, delay
        self.hits: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def html(self, number: int) -> str:
        chosen = random.Random(number)
        children = [n for n in (2 * number + 1, 2 * number + 2) if n < self.pages]
        links = [f"page{n}" for n in children]
        links += [f"/page{chosen.randrange(1, self.pages)}#part{n}" for n in range(3)]
        links += ["/", "http://elsewhere.invalid/", "/missing"]
        anchors = "\n".join(f'<a href="{link}">{link}</a>' for link in links)
        return f"<html><title>Page {number}</title><body>{anchors}</body></html>"


class SiteHandler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        self.server.hits[self.path] += 1
        time.sleep(self.server.delay)  # simulates the latency of a real site
        name = self.path.removeprefix("/page").removeprefix("/") or "0"
        if not name.isdecimal() or int(name) >= self.server.pages:
            self.send_error(404)
            return
        body = self.server.html(int(name)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Crawl a local web site with a queue of work.")
    parser.add_argument("--workers", type=int, default=4, help="crawling processes (default: 4)")
    parser.add_argument("--pages", type=int, default=200, help="size of the site (default: 200)")
    parser.add_argument(
        "--delay", type=float, default=0.02, help="seconds the server takes (default: 0.02)"
    )
    args = parser.parse_args()
    if args.workers < 1 or args.pages < 2:
        parser.error("there must be at least 1 worker and 2 pages")

    site = Site(args.pages, args.delay)
    threading.Thread(target=site.serve_forever, daemon=True).start()

    queue = this_proc().spawn("queue", Queue, site.url)
    procs = this_host().spawn_procs({"workers": args.workers})
    workers = procs.spawn("crawlers", Worker, queue)

    start = time.perf_counter()
    crawling = workers.crawl.call()
    while True:
        try:
            visited = crawling.get(timeout=1)  # a timeout leaves the call running
            break
        except TimeoutError:
            done, known = queue.progress.call_one().get()
            print(f"{done} pages visited of {known} known", flush=True)
    seconds = time.perf_counter() - start
    pages = queue.results.call_one().get()
    queue.stop().get()
    procs.stop().get()
    site.shutdown()
    site.server_close()

    good = [page for page in pages if page.status == 200]
    links = sum(len(page.links) for page in good)
    print(f"{len(good)} pages, {links} links, {len(pages) - len(good)} broken, in {seconds:.2f} s")
    print("pages by worker:", *(f"{point.rank}: {n}" for point, n in visited.items()), sep="  ")

    asked_twice = [path for path, hits in site.hits.items() if hits > 1]
    titles = {page.title for page in good}
    if titles != {f"Page {n}" for n in range(args.pages)} or asked_twice:
        print(f"error: {len(titles)} of {args.pages} pages, twice: {asked_twice}", file=sys.stderr)
        return 1
    print("every page was visited exactly once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
