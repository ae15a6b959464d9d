"""Images are shown as a viewer shows them; right values from the formats' specifications and torchvision."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from data_makers import encode, picture
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

from launcher.data.decode import BadImage, decode

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(image: Image.Image) -> list[tuple[int, int, int]]:
    """Colours near the corners: top left, top right, bottom left, bottom right."""
    near, far = image.width // 8, image.width - 1 - image.width // 8
    return [image.getpixel(place) for place in ((near, near), (far, near), (near, far), (far, far))]


def quarters() -> Image.Image:
    image = Image.new("RGB", (80, 48))
    for box, colour in (((0, 0), RED), ((40, 0), GREEN), ((0, 24), BLUE), ((40, 24), WHITE)):
        image.paste(colour, (*box, box[0] + 40, box[1] + 24))
    return image


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """Build a PNG by the specification, for what Pillow cannot write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = b"".join(chunk(name, data) for name, data in chunks)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + body
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


# The EXIF specification's table: which quarter of the stored picture is seen at TL, TR, BL, BR.
ORIENTATIONS = {
    1: [RED, GREEN, BLUE, WHITE],
    2: [GREEN, RED, WHITE, BLUE],
    3: [WHITE, BLUE, GREEN, RED],
    4: [BLUE, WHITE, RED, GREEN],
    5: [RED, BLUE, GREEN, WHITE],
    6: [BLUE, RED, WHITE, GREEN],
    7: [WHITE, GREEN, BLUE, RED],
    8: [GREEN, WHITE, RED, BLUE],
}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    shown = corners(decode(encode(quarters(), form, exif=exif, **options), 32))
    assert np.abs(np.array(shown) - np.array(ORIENTATIONS[orientation])).max() < 12


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_orientation_agrees_with_torchvision(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture(1, (64, 64)), exif=exif, quality=98)
    bytes_1d = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    expected = decode_image(bytes_1d, ImageReadMode.RGB, apply_exif_orientation=True).permute(1, 2, 0).numpy()
    ours = np.asarray(decode(data, 64))
    assert np.abs(ours.astype(int) - expected.astype(int)).max() <= 2


def test_hidden_colour_under_alpha_is_white() -> None:
    image = Image.new("RGBA", (20, 20), (255, 0, 0, 0))
    assert decode(encode(image, "PNG"), 10).getpixel((5, 5)) == WHITE


def test_half_transparent_is_mixed_with_white() -> None:
    image = Image.new("RGBA", (20, 20), (0, 0, 0, 128))
    assert decode(encode(image, "PNG"), 10).getpixel((5, 5)) == pytest.approx((127, 127, 127), abs=1)
    grey = Image.new("LA", (20, 20), (0, 128))
    assert decode(encode(grey, "PNG"), 10).getpixel((5, 5)) == pytest.approx((127, 127, 127), abs=1)


def test_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    assert decode(encode(image, "PNG", transparency=1), 8).getpixel((4, 4)) == WHITE
    assert decode(encode(image, "GIF", transparency=1), 8).getpixel((4, 4)) == WHITE
    assert decode(encode(image, "PNG"), 8).getpixel((4, 4)) == RED


@pytest.mark.parametrize(("value", "shown"), [(0, 0), (257 * 40, 40), (32896, 128), (65535, 255)])
def test_16_bit_grey_is_scaled_not_clipped(value: int, shown: int) -> None:
    rows = (b"\0" + struct.pack(">H", value) * 8) * 8
    assert decode(png(8, 8, 16, 0, rows), 8).getpixel((3, 3)) == (shown,) * 3
    tiff = Image.fromarray(np.full((8, 8), value, dtype=np.uint16))
    assert decode(encode(tiff, "TIFF"), 8).getpixel((3, 3)) == (shown,) * 3


def test_16_bit_colour_and_its_transparency() -> None:
    red = (b"\0" + struct.pack(">HHH", 65535, 0, 0) * 8) * 8
    assert decode(png(8, 8, 16, 2, red), 8).getpixel((3, 3)) == RED
    clear = (b"\0" + struct.pack(">HHHH", 65535, 0, 0, 0) * 8) * 8
    assert decode(png(8, 8, 16, 6, clear), 8).getpixel((3, 3)) == WHITE
    hidden = (b"\0" + struct.pack(">H", 1000) * 8) * 8
    assert decode(png(8, 8, 16, 0, hidden, (b"tRNS", struct.pack(">H", 1000))), 8).getpixel((3, 3)) == WHITE


def test_float_tiff_is_scaled() -> None:
    image = Image.fromarray(np.full((8, 8), 0.5, dtype=np.float32))
    assert decode(encode(image, "TIFF"), 8).getpixel((3, 3)) == pytest.approx((128, 128, 128), abs=1)


@pytest.mark.parametrize(
    ("mode", "colour", "shown"),
    [
        ("CMYK", (255, 0, 0, 0), (0, 255, 255)),
        ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
        ("CMYK", (0, 0, 0, 0), WHITE),
        ("L", 77, (77, 77, 77)),
    ],
)
def test_cmyk_and_grey_jpeg(mode: str, colour: object, shown: tuple[int, int, int]) -> None:
    data = encode(Image.new(mode, (32, 32), colour), quality=100)
    assert decode(data, 16).getpixel((8, 8)) == pytest.approx(shown, abs=3)


def test_bilevel_image() -> None:
    assert decode(encode(Image.new("1", (9, 9), 1), "PNG"), 4).getpixel((2, 2)) == WHITE


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(form: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (BLUE, RED, GREEN)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], duration=50, **options)
    assert decode(data, 8).getpixel((4, 4)) == BLUE


def test_embedded_profile_is_obeyed() -> None:
    # A profile whose red and blue are swapped: any viewer shows blue as red.
    from PIL import ImageCms

    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    tags = struct.unpack(">I", profile[128:132])[0]
    for place in range(132, 132 + 12 * tags, 12):
        name = bytes(profile[place : place + 4])
        profile[place : place + 4] = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ"}.get(name, name)
    data = encode(
        Image.new("RGB", (16, 16), BLUE),
        "PNG",
        icc_profile=bytes(profile).replace(b"s\0R\0G\0B", b"o\0d\0d\0!"),
    )
    assert decode(data, 8).getpixel((4, 4)) == pytest.approx(RED, abs=3)


def test_reduced_scale_decoding_looks_like_full_decoding() -> None:
    image = picture(7, (1600, 1200))
    data = encode(image, quality=95)
    full = Image.open(io.BytesIO(data)).convert("RGB").resize((128, 128), Image.Resampling.BICUBIC)
    difference = np.abs(np.asarray(decode(data, 128)).astype(int) - np.asarray(full).astype(int))
    assert difference.mean() < 1


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_truncated_image_is_refused_not_painted_grey(form: str, kept: float) -> None:
    data = encode(Image.effect_noise((200, 200), 90).convert("RGB"), form)
    with pytest.raises(BadImage, match="image: damaged"):
        decode(data[: int(len(data) * kept)], 32)


def test_decompression_bombs_are_refused_before_decoding() -> None:
    huge = png(60_000, 60_000, 8, 2, b"\0" * 1000)
    with pytest.raises(BadImage, match="too many pixels"):
        decode(huge, 32)
    large = png(10_000, 9_500, 8, 2, b"\0" * 1000)
    with pytest.raises(BadImage, match="too many pixels"):
        decode(large, 32)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\xff\xd8"]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(BadImage, match=r"^image: "):
        decode(data, 32)
