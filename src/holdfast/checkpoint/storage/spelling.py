"""Near-misses of a URI. Pure.

`s3//bucket` is a directory by the letter, and nobody has ever meant it: a run would save to the disk
that it is to survive.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from holdfast.core.errors import ConfigError

SCHEMES = ("file", "s3", "gs", "az", "hdfs")
FOREIGN = {  # what other programs call the same places
    "s3a": "s3",
    "s3n": "s3",
    "aws": "s3",
    "minio": "s3",
    "gcs": "gs",
    "gcp": "gs",
    "abfs": "az",
    "abfss": "az",
    "azure": "az",
    "adl": "az",
    "wasb": "az",
    "wasbs": "az",
    "webhdfs": "hdfs",
    "swebhdfs": "hdfs",
    "viewfs": "hdfs",
    "dfs": "hdfs",
    "local": "file",
}
FORMS = {
    "file": "file:///directory",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix",
    "hdfs": "hdfs://host:port/directory",
}
POSSIBLE = f"a directory, {', '.join(FORMS.values())}"
_BEGINNING = re.compile(r"([A-Za-z][A-Za-z0-9+-]*)([:;,.]*/*[:;,.]*/*)(.*)", re.DOTALL)


def check_spelling(uri: str) -> None:
    """ConfigError, with the right spelling, if it is almost a URI. A directory of such a name is written ./name."""
    if uri != uri.strip():
        raise ConfigError(f"{_shown(uri)!r} begins or ends with a space", hint="leave the space out")
    match = _BEGINNING.fullmatch(uri)
    if match is None:
        return
    word, separator, rest = match.groups()
    scheme = _meant(word)
    right = separator.startswith("://")  # one more slash is for whoever knows the scheme to judge
    if right and word.lower() in SCHEMES:
        return
    if right and not scheme:
        raise ConfigError(f"checkpoints cannot be kept at {word}://", hint=f"possible are {POSSIBLE}")
    known = word.lower() in (*SCHEMES, *FOREIGN)
    like_uri = ":" in separator or ";" in separator or ("//" in separator and known)
    if not like_uri or "/" not in separator + rest:
        return
    if not scheme:
        if separator[:2] == ":/":  # a scheme that nobody knows
            raise ConfigError(
                f"{_shown(uri)} is neither a URI of a place for checkpoints nor a usual path",
                hint=f"possible are {POSSIBLE}; for a directory of that name write ./{_shown(uri)}",
            )
        return
    raise ConfigError(
        f"{_shown(uri)} is almost a URI", hint=f"write {_written(scheme, rest)}, or ./{_shown(uri)} for a directory"
    )


def _meant(word: str) -> str:
    """The scheme that `word` stands for; empty if none is near."""
    lower = word.lower()
    if lower in SCHEMES:
        return lower
    near = get_close_matches(lower, SCHEMES, n=1, cutoff=0.5 if len(lower) <= 2 else 0.7)
    return FOREIGN.get(lower) or (near[0] if near else "")


def _written(scheme: str, rest: str) -> str:
    place = rest.strip("/")
    if "@" in place or not place:
        return FORMS[scheme]
    if scheme == "file":
        return f"file:///{place}"
    if scheme == "hdfs" and ":" not in place.partition("/")[0]:
        return f"hdfs://host:port/{place}"
    return f"{scheme}://{place}"


def _shown(uri: str) -> str:
    """Without what may be a secret, and not too long."""
    text = uri if "@" not in uri else re.sub(r"[^/:]*:?[^/]*@", "…@", uri)
    return text if len(text) <= 200 else f"{text[:200]}…"
