"""flashcli: fp32-accurate attention from file to file, or on arrays where they lie, on a GPU or without one."""

__version__ = "0.1.0"
__all__ = ["FlashError", "attention", "attention_backward", "decode", "merge", "write_kv"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    # Imported on first use, so that `flashcli --help` does not wait for NumPy; later uses do not come here.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    room = import_module("flashcli.errors" if name == "FlashError" else "flashcli.api")
    found = globals()[name] = getattr(room, name)
    return found
