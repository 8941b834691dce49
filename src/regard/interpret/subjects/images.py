"""Vision models of transformers as subjects: the patches of an image are the tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.checkpoints.files import first_line
from regard.errors import InputError
from regard.interpret.subjects.library import LibraryModel
from regard.interpret.subjects.others import FoundLayers, Sizes, attention_calls, refusing
from regard.interpret.subjects.subject import Chunk
from regard.models.bundle import evaluating
from regard.text.words import Tokens, Word

CLASS_TOKEN = "[CLS]"


class ImageModel(FoundLayers):
    """A vision model and an image.

    Patches are named by row and column, as "3,4". The tokens before them are "[CLS]" and, if there
    are more, "[extra 1]", "[extra 2]", ...
    """

    writes = False

    def __init__(self, model: Any, pixels: Tensor) -> None:
        self.model, self.name = model, type(model).__name__
        self._encoder = model.get_encoder(modality="image")
        first = next(model.parameters())
        self._pixels = pixels.to(first.device, first.dtype)
        with refusing(self.name, "an image"):
            calls = attention_calls(model, lambda: self.run((), None, None))
        own = [call for call in calls if call.batch == 1 and call.queries == call.keys]
        count = max((call.queries for call in own), default=0)
        self._find(calls, [Sizes("", False, count, count)])
        self.grid = self._grid(count)
        rows, columns = self.grid
        self.before = before = count - rows * columns  # tokens before the patches
        self._labels = (
            *(CLASS_TOKEN if place == 0 else f"[extra {place}]" for place in range(before)),
            *(f"{row},{column}" for row in range(rows) for column in range(columns)),
        )

    def _grid(self, count: int) -> tuple[int, int]:
        """The rows and columns of patches. InputError if the tokens are not the patches."""
        config = self._encoder.config
        size = getattr(config, "patch_size", None)
        sizes = tuple(size) if isinstance(size, Sequence) else (size, size)
        if len(sizes) != 2 or not all(isinstance(each, int) and each > 0 for each in sizes):
            raise InputError(
                f"{self.name} names no patch_size in its config, so its tokens have no places in "
                "the image. Use regard.watch(...)."
            )
        height, width = self._pixels.shape[-2:]
        rows, columns = height // sizes[0], width // sizes[1]
        # At most [CLS], a token for distillation, and the registers that the config names.
        extra = 2 + (getattr(config, "num_register_tokens", None) or 0)
        if not 0 <= count - rows * columns <= extra:
            raise InputError(
                f"{self.name} attends among {count} tokens, but the image has {rows} x {columns} "
                "patches: attention in windows, over merged patches or with other tokens has no "
                "map of the image. Use regard.watch(...)."
            )
        return rows, columns

    def tokens(self) -> Tokens:
        """The patches of the image, and the tokens before them."""
        words = (Word(label, (place,)) for place, label in enumerate(self._labels))
        return Tokens(tuple(range(len(self._labels))), self._labels, tuple(words))

    def read(self, text: str) -> Tokens:
        raise InputError(f"{self.name} looks at an image: give image=, not the text {text!r}.")

    def chunks(self, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
        return tokens, (Chunk(0, len(tokens)),)

    @torch.no_grad()
    def run(self, ids: Sequence[int], target: Sequence[int] | None, memory: Any) -> None:
        del ids, target, memory  # an image has none
        with evaluating(self.model):
            self._encoder(pixel_values=self._pixels)


def pixels_of(image: object, model: nn.Module | LibraryModel) -> Tensor:
    """The pixel values [1, channels, height, width] of an image, a file or a tensor."""
    if isinstance(image, Tensor):
        pixels = image[None] if image.dim() == 3 else image
        if pixels.dim() != 4 or len(pixels) != 1 or not pixels.is_floating_point():
            raise InputError(
                "Pixel values are floating-point numbers [channels, height, width] of one image, "
                f"but got {image.dtype} {list(image.shape)}."
            )
        return pixels
    if not isinstance(model, LibraryModel):
        raise InputError(
            "A loaded model takes pixel values: image=processor(picture, "
            'return_tensors="pt").pixel_values. With a folder or a name, image= is a file, too.'
        )
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            "Reading an image needs Pillow, which is not installed: pip install "
            "'regard[transformers]'."
        ) from None
    if isinstance(image, str | os.PathLike):
        try:
            with Image.open(image) as opened:
                image = opened.convert("RGB")
        except (OSError, ValueError) as error:
            raise InputError(f"{image} cannot be read as an image: {first_line(error)}") from None
    if not isinstance(image, Image.Image):
        raise InputError(
            "image= takes a file, an image of Pillow, or a tensor of pixel values, not "
            f"{type(image).__name__}."
        )
    with refusing(model.name, "an image"):
        pixels = model.image_processor(images=image, return_tensors="pt")["pixel_values"]
    return pixels_of(pixels, model)
