"""Decodes, converts and encodes images with Pillow, after their size was checked.

The only module that opens images with Pillow. The format is the one that the bytes tell, never one that was declared.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image as Pillow
from PIL import ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base as Tag

from gateway.media.png_profile import drop_colour_profile
from gateway.media.sniff import MediaError, raster_type, read_image_size
from gateway.policy_text import repeatable
from gateway.types import Image, Video
from gateway.wire import is_array

MAX_PIXELS = 64_000_000
"""A larger image is refused: decoding it would take 256 MB."""
PILImage = Pillow.Image
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_STRIP_PIXELS = 4_000_000
_CHANNEL_COUNTS = (1, 3, 4)
_TORCH_TYPE_CODES = {"torch.uint8": "u1", "torch.uint16": "u2", "torch.bool": "b1"}


def measure_image(data: bytes, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Width and height from the header; raises MediaError for more than `max_pixels`."""
    width, height = read_image_size(data)
    _check_pixel_count(width, height, max_pixels)
    return width, height


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> PILImage:
    """Opens an image of allowed size without decoding it; raises MediaError."""
    measure_image(data, max_pixels)
    image_format = raster_type(data).removeprefix("image/").upper()
    try:
        image = Pillow.open(io.BytesIO(data), formats=(image_format,))
        _check_pixel_count(*image.size, max_pixels)  # A frame may be larger than the header says.
    except MediaError:
        raise
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        if (without_profile := drop_colour_profile(data)) is not None:
            return open_image(without_profile, max_pixels)
        raise _unreadable_error(error) from error
    return image


def with_usable_profile(data: bytes, max_pixels: int = MAX_PIXELS) -> bytes:
    """The same data, or a PNG without its colour profile if that alone keeps the image from being opened."""
    without_profile = drop_colour_profile(data)
    if without_profile is None:
        return data
    try:
        Pillow.open(io.BytesIO(data), formats=("PNG",)).close()
    except Exception:  # boundary: over hostile bytes a decoder may raise anything
        open_image(without_profile, max_pixels)
        return without_profile
    return data


def decode_image(image: PILImage) -> PILImage:
    """Loads the pixels of an opened image, or of the current frame of an animated one; raises MediaError."""
    try:
        image.load()
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise _unreadable_error(error) from error
    if not all(image.size):
        raise MediaError(f"not a readable image: its size is {image.width}x{image.height}")
    return image


def is_animated(image: PILImage) -> bool:
    """Whether an image has several frames. Multi-picture JPEGs, such as stereo photographs, are not animated."""
    try:
        return image.format in ("GIF", "PNG", "WEBP") and bool(getattr(image, "is_animated", False))
    except Exception:  # boundary: over hostile bytes a decoder may raise anything; the first frame is usable
        return False


def to_rgb(image: PILImage) -> PILImage:
    """Converts to RGB: EXIF orientation applied, transparency over white, more bits reduced to 8; raises MediaError."""
    image = _apply_exif_orientation(decode_image(image))
    try:
        if image.mode == "F" or image.mode.startswith("I"):
            image = _to_8bit_grey(image)
        return _convert_strips(image) if image.mode != "RGB" or image.has_transparency_data else image
    except MediaError:
        raise
    except ValueError as error:
        raise _unreadable_error(error) from error


def _convert_strips(image: PILImage) -> PILImage:
    """Converts to RGB strip by strip, because converting holds the interpreter."""
    rows = max(1, _STRIP_PIXELS // image.width)
    converted = Pillow.new("RGB", image.size)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        if image.has_transparency_data:
            rgba = strip.convert("RGBA")
            strip = Pillow.alpha_composite(Pillow.new("RGBA", rgba.size, "white"), rgba)
        converted.paste(strip.convert("RGB"), (0, top))
    return converted


def _apply_exif_orientation(image: PILImage) -> PILImage:
    try:
        is_turned = image.getexif().get(Tag.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if is_turned else image
    except Exception:  # boundary: over hostile bytes a decoder may raise anything; the pixels are sound
        return image


def _to_8bit_grey(image: PILImage) -> PILImage:
    """Reduces wide greyscale values as `_to_uint8` does for arrays; 16 bits keep their upper 8."""
    is_float = image.mode == "F"
    wide = image if is_float else image.convert("I")
    low, high = _value_range(wide)
    is_16bit = image.mode.startswith("I;") or (image.mode == "I" and 255 < high <= 65_535)
    _check_value_range(low, high // 256 if is_16bit else high)
    scale = 1 / 256 if is_16bit else 255.0 if is_float and high <= 1 else 1.0
    rounding = 0.5 if is_float else 0.0
    grey = wide.point(lambda level: level * scale + rounding).convert("L")
    grey.info.pop("transparency", None)  # It is a level of the wide values.
    return grey


def _value_range(image: PILImage) -> tuple[float, float]:
    """Lowest and highest value of one channel; NaN for the highest if any value is NaN, which the mean shows."""
    low, high = image.getextrema()
    mean = image.resize((1, 1), Pillow.Resampling.BOX).getpixel((0, 0))
    return float(low), float(high if mean == mean else mean)  # type: ignore[arg-type]  # numbers, of one channel


def resize_image(image: PILImage, size: tuple[int, int]) -> PILImage:
    """Resizes to (width, height), bicubic."""
    return image if image.size == size else image.resize(size, Pillow.Resampling.BICUBIC)


def encode_png(image: PILImage) -> Image:
    """Encodes as PNG: lossless, and equal bytes for equal pixels; raises MediaError."""
    image = _apply_exif_orientation(decode_image(image))
    return Image(_save(image if image.mode in _PNG_MODES else to_rgb(image), "PNG"), "image/png")


def encode_video(frames: Sequence[PILImage], fps: float) -> Video:
    """Encodes frames as a lossless animated WebP; raises MediaError."""
    if not frames:
        raise MediaError("a video without frames")
    first, *rest = (to_rgb(frame) for frame in frames)
    if different := next((frame for frame in rest if frame.size != first.size), None):
        raise MediaError(f"a video with frames of different sizes: {first.size} and {different.size}")
    duration_ms = max(1, round(1000 / fps))
    data = _save(first, "WEBP", save_all=True, append_images=rest, lossless=True, duration=duration_ms)
    return Video(data, "video/webp")


def _save(image: PILImage, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        image.save(buffer, format=image_format, **options)
    except Exception as error:  # boundary: an encoder may raise anything over an image that a tool built by hand
        raise MediaError(f"an image that cannot be encoded as {image_format}: {error}") from error
    return buffer.getvalue()


def is_pil_or_array(value: Any) -> bool:
    """Whether a value is a PIL image, a numpy array or a torch tensor."""
    return isinstance(value, PILImage) or is_array(value)


def looks_like_image(value: Any) -> bool:
    """Whether a value that was not declared an image is one: a PIL image, or an array of fitting shape and type."""
    if isinstance(value, PILImage) or not is_array(value):
        return isinstance(value, PILImage)
    shape, type_code = _shape_and_type(value)
    if not all(shape) or len(shape) not in (2, 3, 4):
        return False
    if len(shape) == 2:
        return type_code in ("u1", "u2", "b1")
    return shape[-1] in _CHANNEL_COUNTS or shape[-3] in _CHANNEL_COUNTS


def to_pil_image(value: Any) -> PILImage:
    """A PIL image from a PIL image or an array: rows, columns and maybe channels, or channels first."""
    if isinstance(value, PILImage):
        return value
    array = _to_numpy(value)
    shape = _shape(array)
    if len(shape) not in (2, 3) or not all(shape):
        raise MediaError(f"an array of shape {shape} is not an image: it needs rows and columns, and may have channels")
    array = _to_uint8(array)
    try:
        if len(shape) == 3 and shape[-1] not in _CHANNEL_COUNTS and shape[0] in _CHANNEL_COUNTS:
            array = array.transpose(1, 2, 0)
        if len(shape) == 3 and _shape(array)[-1] == 1:
            array = array[:, :, 0]
        return Pillow.fromarray(array)
    except (TypeError, ValueError, KeyError) as error:
        raise MediaError(f"an array of shape {shape} is not an image: {error}") from error


def frames_from_array(value: Any) -> list[PILImage]:
    """Video frames from an array of four axes, time first."""
    array = _to_uint8(_to_numpy(value))
    shape = _shape(array)
    if len(shape) != 4:
        raise MediaError(f"an array of shape {shape} is not a video: it needs frames, rows, columns and channels")
    return [to_pil_image(frame) for frame in array]


def _to_numpy(value: Any) -> Any:
    if hasattr(value, "__array_interface__"):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _shape_and_type(value: Any) -> tuple[tuple[int, ...], str]:
    """The shape of an array or tensor, and numpy's code of its type, such as `u1`."""
    if hasattr(value, "__array_interface__"):
        return _shape(value), str(value.__array_interface__["typestr"])[1:]
    return tuple(value.shape), _TORCH_TYPE_CODES.get(str(value.dtype), "")


def _shape(array: Any) -> tuple[int, ...]:
    return tuple(array.__array_interface__["shape"])


def _to_uint8(array: Any) -> Any:
    """Values from 0 to 255, or from 0 to 1, as bytes; `u2` stays, since Pillow has images of 16 bits."""
    _, type_code = _shape_and_type(array)
    if type_code in ("u1", "u2"):
        return array
    low, high = float(array.min()), float(array.max())
    _check_value_range(low, high)
    is_fraction = type_code[0] == "b" or (type_code[0] == "f" and high <= 1)
    return (array * 255.0 if is_fraction else array * 1.0).round().astype("uint8")


def _check_value_range(low: float, high: float) -> None:
    if not (low >= 0 and high <= 255):  # also where one of them is NaN
        raise MediaError(f"values from {low:g} to {high:g}; an image has 0 to 255, or 0 to 1")


def _check_pixel_count(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise MediaError(f"{width}x{height} pixels, more than {max_pixels}")


def _unreadable_error(error: Exception) -> MediaError:
    if isinstance(error, UnidentifiedImageError):  # Its text has the address of our buffer.
        return MediaError("not a readable image: its data cannot be decoded")
    lines = repeatable(str(error)).splitlines()
    return MediaError(f"not a readable image: {lines[0][:200] if lines else type(error).__name__}")
