"""Uploads that were begun and never completed.

S3 and what is like it keep the parts of such an upload until somebody aborts it: no list of files shows them, and they
are paid for. Other stores drop them after some days by themselves.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

__all__ = ["abort_upload", "list_uploads"]


def list_uploads(fs: Any, folder: str) -> Iterator[tuple[str, str]]:
    """The uploads of files of a folder, each as the file's name in the folder and the upload's id.

    Args:
        fs: The file system; there are none where it doesn't tell of them.
        folder: Its name there.
    """
    if not hasattr(fs, "abort_mpu"):
        return
    bucket, key, _ = fs.split_path(folder)
    prefix = f"{key}/" if key else ""
    after: dict[str, str] = {}
    while True:
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after)
        for upload in page.get("Uploads", ()):
            if upload["Key"].startswith(prefix):
                yield upload["Key"].removeprefix(prefix), upload["UploadId"]
        if not page.get("IsTruncated"):
            return
        after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def abort_upload(fs: Any, path: str, upload: str) -> None:
    """Drop the parts of an upload.

    Args:
        fs: The file system.
        path: The file.
        upload: The upload's id.
    """
    bucket, key, _ = fs.split_path(path)
    with contextlib.suppress(FileNotFoundError):  # somebody else did
        fs.abort_mpu(bucket, key, upload)
