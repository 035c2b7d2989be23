"""A spawn in a removed working directory names the cause; it works again after `os.chdir`."""

from __future__ import annotations

from collections.abc import Callable

TEXT = (
    "[Errno 2] No such file or directory: the working directory of this process was removed, and "
    "new processes start in it; change to another one with os.chdir()"
)


def test_it_says_so_and_goes_on_in_another(program: Callable[[str], str]) -> None:
    printed = program("""
        os.mkdir("removed")
        os.chdir("removed")
        os.rmdir("../removed")

        def spawn():
            return this_host().spawn_procs().spawn("echo", Echo)

        from monarch.cli import main
        sys.stderr = sys.stdout
        for path in ([], [""]):  # as in a script, and in an interactive session
            sys.path[:0] = path
            try:
                spawn()
            except FileNotFoundError as error:
                print(error)
        print(main(["exec", "ls"]))
        os.chdir("/")
        print(spawn().echo.call_one("done").get())
    """).splitlines()
    assert printed == [TEXT, TEXT, f"monarch exec: {TEXT}", "1", "done"]
