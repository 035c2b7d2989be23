"""Write docs/settings.md from the table of keys; `make docs` calls it, and a test compares."""

from pathlib import Path

from monarch._engine.base.settings import KEYS, Key

PAGE = Path(__file__).with_name("settings.md")

TEXT = """\
<!-- Made by docs/make_settings.py from monarch/_engine/base/settings.py (`make docs`). -->

# Settings

```python
from monarch.config import configure, configured, get_global_config

configure(host_timeout="5s")  # for this process, and for procs that are spawned from now on
with configured(tail_log_lines=20):  # for a block
    print(get_global_config()["tail_log_lines"])
```

```text
20
```

A value comes from the first of these that has one: the environment variable; `configure`; the
values that a proc got from the program that spawned it; the default. So a variable overrides what a
program configures, which then gets a warning. `monarch.config.config_origin(key)` says where the
value of a key comes from. An unknown key is a `ValueError`, a bad value a `TypeError`, and then
nothing is changed. Durations are texts such as `500ms`, `30s`, `1m 30s`.

## Settings that do something

| key | meaning | value | default | variable |
|---|---|---|---|---|
{read}

## Settings that are accepted and change nothing

These are torchmonarch's. Programs that set them run, the values can be read back, and no code here
looks at them: what they tune does not exist here, or needs no tuning. `configure` says so once for
each key that is given another value than its default, with a `monarch.config.UnusedSettingWarning`.

| key | value | default | variable |
|---|---|---|---|
{unread}
"""


def page() -> str:
    """The text of docs/settings.md."""
    read = "\n".join(line(name, key) for name, key in KEYS.items() if key.is_read)
    unread = "\n".join(line(name, key) for name, key in KEYS.items() if not key.is_read)
    return TEXT.format(read=read, unread=unread)


def line(name: str, key: Key) -> str:
    """One row: `host_timeout`, what it means (if read), what it takes, default and variable."""
    noun = key.kind.noun.removeprefix("a ").removeprefix("an ").partition(" such as")[0]
    default = key.kind.show(key.default)
    shown = "empty" if default == "" else f"`{default}`"
    meaning = f"{key.doc} | " if key.is_read else ""
    return f"| `{name}` | {meaning}{noun} | {shown} | `{key.variable}` |"


if __name__ == "__main__":
    PAGE.write_text(page())
