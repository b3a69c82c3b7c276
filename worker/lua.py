"""The worker's Lua scripts and the one of `clients` that appends, called by their SHA-1.

A script that the server does not know (it was restarted, or SCRIPT FLUSH) answers NOSCRIPT: then nothing was done, all
scripts are loaded anew and the same call is sent again. `connection` does that.
"""

from __future__ import annotations

from ..clients.lua import APPEND, Script, load_script

Arg = bytes | str | int
Args = tuple[Arg, ...]  # one command, to be packed
Command = Args | bytes  # bytes: packed already (`frame`)

_PACKAGE = __package__ or "headrace.worker"

TAKE = load_script(_PACKAGE, "take")
RENEW = load_script(_PACKAGE, "renew")
FETCH = load_script(_PACKAGE, "fetch")
ACKNOWLEDGE = load_script(_PACKAGE, "acknowledge")
HAND_BACK = load_script(_PACKAGE, "hand_back")
LEAVE = load_script(_PACKAGE, "leave")
HEARTBEAT = load_script(_PACKAGE, "heartbeat")

ALL = (APPEND, TAKE, RENEW, FETCH, ACKNOWLEDGE, HAND_BACK, LEAVE, HEARTBEAT)


def call(script: Script, keys: Args, args: Args = ()) -> Args:
    """The command that runs a script; the script's head says which keys and arguments it takes."""
    return (b"EVALSHA", script.sha, len(keys), *keys, *args)
