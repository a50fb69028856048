"""Conversion of checkpoints from and to other formats, by one process in bounded memory."""

from ferrodist.checkpoint.convert.dcp import export_dcp, import_dcp
from ferrodist.checkpoint.convert.hugging_face import export_hugging_face, import_hugging_face
from ferrodist.checkpoint.convert.torch_file import export_torch_file, import_torch_file

__all__ = [
    "export_dcp",
    "export_hugging_face",
    "export_torch_file",
    "import_dcp",
    "import_hugging_face",
    "import_torch_file",
]


def __dir__() -> list[str]:
    return sorted(__all__)
