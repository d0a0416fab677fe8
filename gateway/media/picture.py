"""The one door to Pillow: what is measured may come in, as the type that its bytes told, and nothing else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image as Pillow
from PIL import ImageOps
from PIL.ExifTags import Base as Tag

from gateway.media.header import size
from gateway.media.kind import MediaError, raster
from gateway.plain import is_array
from gateway.types import Image, Video

MOST_PIXELS = 64_000_000
"""A larger picture is refused: decoding it would cost a quarter of a gigabyte."""
UNWARNED_PIXELS = 89_478_485
"""Beyond these Pillow warns, and beyond twice as many it refuses."""
Picture = Pillow.Image
_KEPT_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_CHANNELS = (1, 3, 4)
_OF_TENSORS = {"torch.uint8": "u1", "torch.uint16": "u2", "torch.bool": "b1"}


def measured(data: bytes, most_pixels: int = MOST_PIXELS) -> tuple[int, int]:
    """Width and height, from the header alone; raises MediaError for more pixels than may be decoded."""
    width, height = size(data)
    _bounded(width, height, most_pixels)
    return width, height


def opened(data: bytes, most_pixels: int = MOST_PIXELS) -> Picture:
    """A picture, measured and not yet decoded."""
    measured(data, most_pixels)
    form = raster(data).removeprefix("image/").upper()
    try:
        picture = Pillow.open(io.BytesIO(data), formats=(form,))
        _bounded(*picture.size, most_pixels)  # A frame may be larger than the header says.
    except MediaError:
        raise
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise _unreadable(error) from error
    return picture


def decoded(picture: Picture) -> Picture:
    """The same, with its pixels at hand; for what moves, those of the frame that it stands at."""
    try:
        picture.load()
    except Exception as error:  # boundary: over hostile bytes a decoder may raise anything
        raise _unreadable(error) from error
    if not all(picture.size):
        raise MediaError(f"not a readable picture: it is {picture.width}x{picture.height}")
    return picture


def moves(picture: Picture) -> bool:
    """Whether there are further frames; a photograph with a second one for the other eye does not move."""
    try:
        return picture.format in ("GIF", "PNG", "WEBP") and bool(getattr(picture, "is_animated", False))
    except Exception:  # boundary: over hostile bytes a decoder may raise anything; the frame that is there counts
        return False


def opaque(picture: Picture) -> Picture:
    """As it is seen: upright, in red, green and blue; what shines through is white. Raises MediaError."""
    picture = _upright(decoded(picture))
    try:
        if picture.mode == "F" or picture.mode.startswith("I"):
            picture = _grey(picture)
        elif picture.has_transparency_data:
            over = picture.convert("RGBA")
            picture = Pillow.alpha_composite(Pillow.new("RGBA", over.size, "white"), over)
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    except MediaError:
        raise
    except ValueError as error:
        raise _unreadable(error) from error


def _upright(picture: Picture) -> Picture:
    """As the camera was held; where that cannot be read, as its rows lie."""
    try:
        turned = picture.getexif().get(Tag.Orientation, 1) != 1
        return ImageOps.exif_transpose(picture) if turned else picture
    except Exception:  # boundary: over hostile bytes a decoder may raise anything; the pixels are sound
        return picture


def _grey(picture: Picture) -> Picture:
    """Numbers of more than eight bits, read as an array's are; of sixteen bits the upper eight count."""
    shares = picture.mode == "F"
    wide = picture if shares else picture.convert("I")
    low, high = _range(wide)
    sixteen = picture.mode.startswith("I;") or (picture.mode == "I" and 255 < high <= 65_535)
    _in_range(low, high // 256 if sixteen else high)
    scale = 1 / 256 if sixteen else 255.0 if shares and high <= 1 else 1.0
    half = 0.5 if shares else 0.0
    grey = wide.point(lambda level: level * scale + half).convert("L")
    grey.info.pop("transparency", None)  # It names a level of the wider numbers.
    return grey


def _range(picture: Picture) -> tuple[float, float]:
    """The least and the greatest number of one channel; in place of the latter what is none, as the mean tells."""
    low, high = picture.getextrema()
    mean = picture.resize((1, 1), Pillow.Resampling.BOX).getpixel((0, 0))
    return float(low), float(high if mean == mean else mean)  # type: ignore[arg-type]  # numbers, of one channel


def resized(picture: Picture, sides: tuple[int, int]) -> Picture:
    return picture if picture.size == sides else picture.resize(sides, Pillow.Resampling.BICUBIC)


def encoded(picture: Picture) -> Image:
    """As PNG, which loses nothing and is the same for the same pixels. Raises MediaError."""
    picture = _upright(decoded(picture))
    return Image(_written(picture if picture.mode in _KEPT_MODES else opaque(picture), "PNG"), "image/png")


def encoded_film(frames: Sequence[Picture], fps: float) -> Video:
    """Frames as one animated picture, which loses nothing. Raises MediaError."""
    if not frames:
        raise MediaError("a film without frames")
    first, *rest = (opaque(frame) for frame in frames)
    if odd := next((frame for frame in rest if frame.size != first.size), None):
        raise MediaError(f"a film with frames of {first.size} and of {odd.size}")
    duration_ms = max(1, round(1000 / fps))
    data = _written(first, "WEBP", save_all=True, append_images=rest, lossless=True, duration=duration_ms)
    return Video(data, "video/webp")


def _written(picture: Picture, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    try:
        picture.save(out, format=form, **options)
    except Exception as error:  # boundary: what a tool made by hand may make an encoder raise anything
        raise MediaError(f"a picture that cannot be written as {form}: {error}") from error
    return out.getvalue()


def is_picture(value: Any) -> bool:
    return isinstance(value, Picture) or is_array(value)


def shows(value: Any) -> bool:
    """Whether a value that nobody called a picture is one. Other arrays are numbers."""
    if isinstance(value, Picture) or not is_array(value):
        return isinstance(value, Picture)
    shape, kind = _form(value)
    if not all(shape) or len(shape) not in (2, 3, 4):
        return False
    return kind in ("u1", "u2", "b1") if len(shape) == 2 else shape[-1] in _CHANNELS or shape[-3] in _CHANNELS


def of_value(value: Any) -> Picture:
    """A picture of Pillow's, or an array: rows, columns and channels, or channels first."""
    if isinstance(value, Picture):
        return value
    value = _array(value)
    shape = _shape(value)
    if len(shape) not in (2, 3) or not all(shape):
        raise MediaError(
            f"an array of shape {shape} that is no picture: it needs rows and columns, and may have channels"
        )
    value = _as_bytes(value)
    try:
        if len(shape) == 3 and shape[-1] not in _CHANNELS and shape[0] in _CHANNELS:
            value = value.transpose(1, 2, 0)
        if len(shape) == 3 and _shape(value)[-1] == 1:
            value = value[:, :, 0]
        return Pillow.fromarray(value)
    except (TypeError, ValueError, KeyError) as error:
        raise MediaError(f"an array of shape {shape} that is no picture: {error}") from error


def frames_of_array(value: Any) -> list[Picture]:
    """Frames from an array of four axes, the first of which is time."""
    value = _as_bytes(_array(value))
    if len(_shape(value)) != 4:
        raise MediaError(
            f"an array of shape {_shape(value)}, which is no film: it needs frames, rows, columns, channels"
        )
    return [of_value(frame) for frame in value]


def _array(value: Any) -> Any:
    if hasattr(value, "__array_interface__"):
        return value
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _form(value: Any) -> tuple[tuple[int, ...], str]:
    """The sides of an array, and the kind of its numbers as numpy writes it."""
    if hasattr(value, "__array_interface__"):
        return _shape(value), str(value.__array_interface__["typestr"])[1:]
    return tuple(value.shape), _OF_TENSORS.get(str(value.dtype), "")


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.__array_interface__["shape"])


def _as_bytes(value: Any) -> Any:
    """Numbers from 0 to 255, or shares from 0 to 1, as bytes."""
    _, kind = _form(value)
    if kind in ("u1", "u2"):  # Pillow has pictures of the latter as well.
        return value
    low, high = float(value.min()), float(value.max())
    _in_range(low, high)
    shares = kind[0] == "b" or (kind[0] == "f" and high <= 1)
    return (value * 255.0 if shares else value * 1.0).round().astype("uint8")


def _in_range(low: float, high: float) -> None:
    if not (low >= 0 and high <= 255):  # nor where a number is none
        raise MediaError(f"values from {low:g} to {high:g}, where a picture has 0 to 255, or 0 to 1")


def _bounded(width: int, height: int, most_pixels: int) -> None:
    if width * height > most_pixels:
        raise MediaError(f"{width}x{height} pixels, more than {most_pixels}")


def _unreadable(error: Exception) -> MediaError:
    told = str(error).splitlines()
    return MediaError(f"not a readable picture: {told[0][:200] if told else type(error).__name__}")
