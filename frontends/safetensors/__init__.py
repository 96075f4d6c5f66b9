"""Hugging Face model folders, read as the metadata and tensors of a GGUF model."""

from .folder import is_model_folder as is_model_folder
from .folder import list_files_of_folder as list_files_of_folder
from .folder import open_folder as open_folder
from .folder import read_encoded_folder_pairs as read_encoded_folder_pairs
from .folder import write_folder_as_gguf as write_folder_as_gguf
