"""Decode an image file to square RGB pixels, as a viewer would show it.

Every image becomes S×S by resizing the whole picture (bicubic, antialiased), as ALBEF and BLIP do: a caption
speaks of the whole picture, so nothing is cropped. The order of work saves time: JPEG is decoded at the
smallest scale of the DCT that is not below the target (libjpeg's ``scale_num``); colours are managed and
EXIF orientation is applied after the resize, on few pixels (turning commutes with squashing to a square).
"""

import re
import warnings
from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

MAX_PIXELS = 89_478_485
"""Larger images are refused before they are decoded; Pillow's own warning limit (a quarter GiB of RGB)."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Only formats that hold pixels: EPS, for one, would start Ghostscript on a stranger's program."""

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(ValueError):
    """An image that cannot be shown; ``reason`` is one of a few fixed texts, ``detail`` is the library's."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def decode(data: bytes, size: int) -> Image.Image:
    """Give the first frame of an encoded image as RGB of size×size pixels; raises BadImage only."""
    if not data:
        raise BadImage("image: empty file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of damaged metadata; what matters raises
        image = _open(data)
        try:
            image.draft(None, (size, size))
            image.load()
            small = _squash(image, size)
        # Pillow's plugins raise a dozen types on damaged input: OSError, SyntaxError, struct.error, …
        except Exception as error:
            raise BadImage("image: damaged", _told(error)) from None
        return _turn(image, small)


def _open(data: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadImage("image: too many pixels", str(error)) from None
    except Exception as error:
        raise BadImage("image: not an image", _told(error)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage("image: too many pixels", f"{width}×{height} is more than {MAX_PIXELS}")
    if not (width and height):
        raise BadImage("image: damaged", f"{width}×{height} pixels")
    return image


def _told(error: Exception) -> str:
    """Give the library's words, without the addresses of objects: a pack gives the same bytes every time."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")[:200]


def _squash(image: Image.Image, size: int) -> Image.Image:
    """Convert to RGB and resize; palettes and alpha must go before the resize, colour management after."""
    profile = image.info.get("icc_profile")
    if image.mode == "F" or image.mode.startswith("I"):
        image, profile = _deep_to_grey(image), None
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white.convert("RGB")
    elif image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC)
    transform = _to_srgb(profile, image.mode) if profile else None
    if transform is not None:
        shown = ImageCms.applyTransform(image, transform)
        assert shown is not None  # None is for in-place transforms
        return shown
    return image.convert("RGB")


def _deep_to_grey(image: Image.Image) -> Image.Image:
    """Scale 16 bits per pixel by 257, not by clipping (``convert("L")`` turns almost everything white).

    Integers beyond 16 bits and floats have no agreed white: floats within [0, 1] or [0, 255] are taken
    as such, all others from their lowest to their highest value.
    """
    value = np.asarray(image).astype(np.float64)
    value = np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
    lowest, highest = float(value.min()), float(value.max())
    if image.mode != "F" and lowest >= 0 and highest <= 65535:
        grey = value / 257
    elif image.mode == "F" and lowest >= 0 and highest <= 255:
        grey = value * 255 if highest <= 1 else value
    else:
        grey = (value - lowest) * (255 / max(highest - lowest, 1e-12))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[value == transparent] = 255
    return Image.fromarray(np.rint(grey).astype(np.uint8))


def _turn(image: Image.Image, small: Image.Image) -> Image.Image:
    """Apply EXIF orientation (Pillow itself has turned TIFF by now and dropped the tag)."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF: a viewer shows the picture as it lies
        return small
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return small if turn is None else small.transpose(turn)


@lru_cache(maxsize=32)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Give the transform from an embedded ICC profile; None for sRGB, or where the profile does not apply."""
    try:
        embedded = ImageCms.ImageCmsProfile(BytesIO(profile))
        if mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(embedded):
            return None
        return ImageCms.buildTransform(embedded, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
