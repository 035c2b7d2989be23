"""Configuration of the running program.

>>> from monarch.config import configured, get_global_config
>>> with configured(cleanup_timeout="90s"):
...     get_global_config()["cleanup_timeout"]
'1m 30s'

An environment variable takes precedence over ``configure``. Procs get the client's configuration
when they are spawned. The keys, their meanings, defaults and variables are listed in
docs/settings.md, which is generated from one table, the class ``Settings`` in
``monarch/_engine/base/settings.py``.

Some names are not in ``__all__``, because the reference has them elsewhere or not at all:
``reload_config_from_env``, ``reset_config_to_defaults``, ``UnusedSettingWarning``, and
``config_origin(key)``, which returns the layer that a value comes from.
"""

from monarch._engine.base.settings import Encoding, settings
from monarch._engine.base.settings import UnusedSettingWarning as UnusedSettingWarning
from monarch.config._parametrize import parametrize_config, parametrize_config_pointwise

__all__ = [
    "Encoding",
    "clear_runtime_config",
    "configure",
    "configured",
    "get_global_config",
    "get_runtime_config",
    "parametrize_config",
    "parametrize_config_pointwise",
]

clear_runtime_config = settings.clear_runtime
config_origin = settings.origin
configure = settings.configure
configured = settings.configured
get_global_config = settings.get_global
get_runtime_config = settings.get_runtime
reload_config_from_env = settings.reload_from_env
reset_config_to_defaults = settings.reset_to_defaults
