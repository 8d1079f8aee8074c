"""What an object store's answers mean: who must act, and what they can do. Pure.

obstore reports most answers as text: the status and, in its XML, the store's own word for what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.errors import IntegrityError, NotStored, StorageError, StorageRefused, StorageUnavailable

REASON_CHARACTERS_MAX = 200

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_BAD_CREDENTIALS = frozenset(
    {
        "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "TokenRefreshRequired",
        "InvalidClientTokenId", "AuthenticationFailed", "InvalidAuthenticationInfo", "NoAuthenticationInformation",
    }
)  # fmt: skip
_OTHER_REGION = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
# The services that hand credentials to a virtual machine or a container.
_CREDENTIAL_SERVICE = re.compile(
    r"169\.254\.\d+\.\d+|fd00:ec2::|/latest/api/token|/latest/meta-data|metadata\.google\.internal|metadata/identity"
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; profiles in ~/.aws are not read",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


@dataclass(frozen=True, slots=True)
class BucketAddress:
    scheme: str
    bucket: str
    prefix: str
    endpoint: str = ""  # empty: the provider's own

    def __str__(self) -> str:
        return self.of("").rstrip("/")

    def of(self, name: str) -> str:
        return f"{self.scheme}://{'/'.join(part for part in (self.bucket, self.prefix, name) if part)}"

    @property
    def service(self) -> str:
        return self.endpoint or {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}[self.scheme]

    def missing(self) -> StorageRefused:
        kind = "container" if self.scheme == "az" else "bucket"
        return StorageRefused(
            f"there is no {kind} {self.bucket} at {self.service}", hint="create it, or correct its name or the endpoint"
        )


def is_conflict(error: BaseException) -> bool:
    """Whether two requests met, neither of which has won yet."""
    return _first(_STATUS, str(error)) == "409" and _first(_CODE, str(error)) == "ConditionalRequestConflict"


def translated(error: BaseException, place: BucketAddress, doing: str, name: str) -> StorageError:
    text = str(error).partition("\n\nDebug source:")[0]
    status, code = int(_first(_STATUS, text) or 0), _first(_CODE, text)
    what = f"cannot {doing} {place.of(name)}"
    if code in _NO_BUCKET:
        return place.missing()
    if isinstance(error, FileNotFoundError) or (status == 404 and not _CREDENTIAL_SERVICE.search(text)):
        return NotStored(f"there is no {place.of(name)}")
    if status == 416:
        return IntegrityError(f"{place.of(name)} has fewer bytes than it must have")
    if status == 412:
        return StorageUnavailable(f"{what}: it was replaced meanwhile")
    if _CREDENTIAL_SERVICE.search(text) or "NoCredential" in type(error).__name__:
        return StorageRefused(f"{what}: no credentials were found", hint=_CREDENTIALS[place.scheme])
    if code in _BAD_CREDENTIALS or status == 401:
        said = f" ({code})" if code else ""
        return StorageRefused(
            f"{what}: {place.service} does not accept these credentials{said}", hint=_CREDENTIALS[place.scheme]
        )
    if code == "RequestTimeTooSkewed":
        return StorageRefused(f"{what}: the clock of this host is wrong", hint="let it follow a time server")
    if code in _OTHER_REGION or status in (301, 307):
        return StorageRefused(
            f"{what}: the bucket is in another region", hint="add ?region= to the URI, or set AWS_REGION"
        )
    if status == 403:
        hint = f"let them list, read, write and delete in {place.bucket}, or use others"
        return StorageRefused(f"{what}: these credentials are not allowed to", hint=hint)
    if 400 <= status < 500 and status not in (408, 409, 425, 429):
        return StorageRefused(f"{what}: {place.service} answers {status} {code}".rstrip())
    if status:
        return StorageUnavailable(f"{what}: {place.service} answers {status} {code}".rstrip())
    return StorageUnavailable(f"{what}: {_reason(str(error), place)}")


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _reason(text: str, place: BucketAddress) -> str:
    """Why there was no answer. The client tells it in the structure that it prints after its sentence."""
    if re.search(r"\bTimedOut\b|kind: Timeout\b", text):
        return f"{place.service} does not answer in time"
    if "dns error" in text:
        return f"nobody knows the address of {place.service}"
    if said := re.findall(r'message: "([^"]+)"', text):
        return f"{place.service} cannot be reached ({said[-1]})"
    # One line, without the parts of an address that may hold signatures.
    line = re.sub(r"\?\S+", "", " ".join(text.partition("\n\nDebug source:")[0].split()))
    return line if len(line) <= REASON_CHARACTERS_MAX else f"{line[:REASON_CHARACTERS_MAX]}…"
