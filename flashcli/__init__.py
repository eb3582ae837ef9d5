"""flashcli: fp32-accurate attention from file to file, on a GPU or without one."""

__version__ = "0.1.0"
__all__ = ["FlashError", "attention", "attention_backward", "decode", "write_kv"]


def __getattr__(name: str) -> object:
    # Imported on first use, so that `flashcli --help` does not wait for NumPy.
    if name in ("attention", "attention_backward", "decode", "write_kv"):
        from flashcli import api

        return getattr(api, name)
    if name == "FlashError":
        from flashcli.errors import FlashError

        return FlashError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
