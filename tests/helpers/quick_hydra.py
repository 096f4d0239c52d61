"""Hydra's settings of fairseq's commands, computed once for all commands of a process that choose the same groups."""

import copy
import functools
import sys

from hydra._internal import config_loader_impl, config_repository
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser


def quicken(replace=setattr) -> None:
    """Spare each command a copy of all registered settings, and what a command before it computed too.

    Args:
        replace: sets an attribute, as ``setattr`` does.
    """
    loader, repository = config_loader_impl.ConfigLoaderImpl, config_repository.CachingConfigRepository
    create, stored = config_loader_impl.create_defaults_list, ConfigStore.store
    composed = loader._compose_config_from_defaults_list
    lists, settings = {}, {}

    def take(self, delegate):
        # Only its list of sources is replaced later, and no loaded setting is shared.
        self.delegate, self.cache = copy.copy(delegate), {}

    def create_defaults_list(repo, config_name, overrides_list, **kwargs):
        groups = [override for override in overrides_list if "." not in override.key_or_group]
        folders = [source.path for source in repo.get_sources() if source.scheme() == "file"]
        if any(not folder.endswith("/fairseq/config") for folder in folders):
            return create(repo, config_name, overrides_list, **kwargs)  # a test may change its files
        key = repr((config_name, [override.input_line for override in groups], folders, kwargs))
        if key not in lists:
            lists[key] = create(repo, config_name, groups, **kwargs)
        found = lists[key]
        kept = {override.input_line for override in found.config_overrides}
        result = copy.copy(found)
        result.config_overrides = [
            override for override in overrides_list if override not in groups or override.input_line in kept
        ]
        return result

    def compose(self, defaults, repo):
        for key, found in lists.items():
            if found.defaults is defaults:
                if key not in settings:
                    settings[key] = composed(self, defaults, repo)
                return copy.deepcopy(settings[key])
        return composed(self, defaults, repo)

    def store(self, *args, **kwargs):
        lists.clear()
        settings.clear()
        return stored(self, *args, **kwargs)

    parse = functools.cache(functools.partial(OverridesParser.parse_rule, OverridesParser.create()))
    replace(OverridesParser, "parse_rule", lambda _, text, rule: copy.copy(parse(text, rule)))
    replace(repository, "__init__", take)
    replace(config_loader_impl, "create_defaults_list", create_defaults_list)
    replace(loader, "_compose_config_from_defaults_list", compose)
    replace(ConfigStore, "store", store)
    # Hydra reads the source of each frame of the stack to learn which file calls it.
    start = sys.modules["hydra.initialize"]
    caller = start.detect_calling_file_or_module_from_stack_frame

    def detect(depth):
        frame = sys._getframe(depth)
        if frame.f_globals["__name__"] == "fairseq.dataclass.utils":
            return frame.f_code.co_filename, frame.f_globals["__name__"]
        return caller(depth + 1)

    replace(start, "detect_calling_file_or_module_from_stack_frame", detect)
