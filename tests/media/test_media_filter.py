"""Tests of MediaFilter: valid media within the limits pass, others are replaced by notes with the reason."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
from PIL import Image as Pillow

from gateway.config.models import MediaLimits
from gateway.media.media_filter import REFUSED_METRIC, MediaFilter, MediaStore
from gateway.media.video import DEFAULT_SHOWN_FRAMES, FrameSampling, sample_video
from gateway.types import Audio, Image, Part, Resource, Text, ToolResult, Video
from tests.sample_images import (
    COLORS,
    SVG,
    animation,
    decode,
    decompression_bomb,
    encode,
    plain_image,
    png,
    truncated_png,
)

JPEG = encode(plain_image(20, 10), "JPEG")


def filter_parts(*parts: Part, **limits: Any) -> tuple[Part, ...]:
    return MediaFilter(MediaLimits(**limits)).filter_parts_sync(parts).parts


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Image(decompression_bomb()), "31623x31623 pixels, more than 64000000"),
        (Image(truncated_png()), "(?i)not a readable image: .*truncated"),
        (Image(png()[:20]), "it ends within its header"),
        (Image(SVG, "image/svg+xml"), "SVG images are not supported; render it to one of png"),
        (Image(b"<html><svg>", "image/png"), "11 bytes that are none of png, jpeg, webp, gif, bmp"),
        (Image(b"\0\0\0\x18ftypisom", "image/png"), "video/mp4 is none of"),
        (Image(encode(plain_image(), "TIFF"), "image/png"), "image/tiff is none of"),
        (Image(png() + bytes(33 * 1024 * 1024)), "bytes, more than 33554432"),
        (Audio(bytes(33 * 1024 * 1024)), "bytes, more than 33554432"),
        (Resource("a", "image/png", data=decompression_bomb()), "31623x31623 pixels"),
        (Video(decompression_bomb(), "video/webp"), "31623x31623 pixels"),
    ],
)
def test_refused_media_are_replaced_by_a_note(part: Part, words: str) -> None:
    kept, refused = MediaFilter().filter_parts_sync([Text("a"), part, Text("b")])
    assert refused == 1 and [type(item) for item in kept] == [Text, Text, Text]
    assert isinstance(kept[1], Text) and kept[1].text.startswith(f"[{type(part).__name__.lower()} left out: ")
    assert re.search(words, kept[1].text)


def test_a_decompression_bomb_is_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("it was opened")

    monkeypatch.setattr(Pillow, "open", fail)
    for data in (
        decompression_bomb(),
        decompression_bomb(100_000, 10_000),
        encode(plain_image(), "GIF")[:6] + b"\xff\xff\xff\xff",
    ):
        (part,) = filter_parts(Image(data))
        assert isinstance(part, Text) and "pixels, more than" in part.text


@pytest.mark.parametrize("declared", ["image/png", "image/webp", "text/html", ""])
def test_the_type_comes_from_the_bytes_not_from_the_declaration(declared: str) -> None:
    assert filter_parts(Image(JPEG, declared)) == (Image(JPEG, "image/jpeg"),)
    assert filter_parts(Audio(JPEG, "audio/wav")) == (Image(JPEG, "image/jpeg"),)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_replaced_by_its_first_frame_with_a_note(form: str) -> None:
    image, note = filter_parts(Image(animation(form)))
    assert isinstance(image, Image) and image.mime == "image/png"
    assert decode(image.data).getpixel((0, 0)) == (255, 0, 0) and decode(image.data).n_frames == 1
    assert note == Text("[the image is animated: this is its first frame]")


VIDEO = Video(animation("WEBP", 12, (640, 360), duration_ms=500), "video/webp")


def sampled_frames(video: Part) -> list[Pillow.Image]:
    """The frames that a trainer samples from a video."""
    assert isinstance(video, Video)
    return list(sample_video(video.data, FrameSampling(min_frames=1, max_frames=DEFAULT_SHOWN_FRAMES)).images)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_a_video_is_resampled_to_the_limits(form: str) -> None:
    data = animation(form, 12, (640, 360), duration_ms=500)
    for part, animated in ((Video(data, f"video/{form.lower()}"), "first"), (Image(data), "video")):
        (video,) = filter_parts(part, animated=animated, most_images=4, max_pixels=3136)
        frames = sampled_frames(video)
        assert [frame.size for frame in frames] == [(56, 28)] * 4
        assert [frame.getpixel((0, 0)) for frame in frames] == [
            Pillow.new("RGB", (1, 1), COLORS[index % 6]).getpixel((0, 0)) for index in (0, 4, 7, 11)
        ]
    assert len(sampled_frames(*filter_parts(VIDEO, max_frames=2))) == 2
    assert sampled_frames(*filter_parts(VIDEO, max_pixels=3136))[0].size == (56, 28)
    assert sampled_frames(*filter_parts(VIDEO, min_pixels=320_000))[0].size == (756, 448)


def test_animations_videos_and_resources_become_what_the_limits_say() -> None:
    gif = animation("GIF", 8, duration_ms=250)
    note, *images = filter_parts(Image(gif), animated="frames", fps=1.0)
    assert note == Text("[a video of 2 s: 2 of its 8 frames, evenly spread]") and [*map(type, images)] == [Image] * 2
    assert filter_parts(Image(gif), animated="video") == (Video(gif, "video/gif"),)
    assert [*map(type, filter_parts(VIDEO, videos="frames", max_frames=2))] == [Text, Image, Image]
    assert filter_parts(VIDEO) == filter_parts(VIDEO, max_pixels=640 * 360, max_frames=12) == (VIDEO,)
    assert filter_parts(VIDEO, most_images=0) == (Text("[video left out: at most 0 images of one result are shown]"),)
    link, typed, untyped = (
        Resource("a", mime, data=data) for mime, data in (("image/png", None), ("image/png", png()), (None, JPEG))
    )
    assert filter_parts(link, typed, untyped) == (link, Image(png()), Image(JPEG, "image/jpeg"))


@pytest.mark.parametrize(("earlier", "count"), [(2, 3), ("many", 1)])
async def test_refused_media_are_added_to_those_that_a_server_counted(earlier: object, count: int) -> None:
    result = await MediaFilter()(ToolResult((Image(SVG),), metrics={"a": 1, REFUSED_METRIC: earlier}))
    assert result.metrics == {"a": 1, REFUSED_METRIC: count}


def test_a_note_about_surplus_images_stands_where_the_first_of_them_was() -> None:
    album = [part for index in range(50) for part in (Text(str(index)), Image(png(index + 1, 1)))]
    kept, refused = MediaFilter().filter_parts_sync(album)
    assert refused == 34
    assert [decode(part.data).width for part in kept if isinstance(part, Image)] == list(range(1, 17))
    assert kept[33] == Text("[34 more images left out: at most 16 of one result are shown]")
    assert [part for part in kept if isinstance(part, Text)][:17] == [Text(str(index)) for index in range(17)]
    assert sum(isinstance(part, Text) for part in kept) == 51


def test_images_are_resized_to_the_pixel_limits() -> None:
    (small,) = filter_parts(Image(png(1000, 500)), max_pixels=28 * 28 * 16)
    (large,) = filter_parts(Image(png(10, 20)), min_pixels=32 * 32 * 8, factor=32)
    assert isinstance(small, Image) and decode(small.data).size == (140, 56)
    assert isinstance(large, Image) and decode(large.data).size == (64, 128)
    assert filter_parts(small, max_pixels=28 * 28 * 16) == (small,)


def test_equal_images_are_decoded_and_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore()
    filters = MediaFilter(MediaLimits(), store), MediaFilter(MediaLimits(most_images=1), store)
    first = filters[0].filter_parts_sync([Image(bytes(bytearray(png())))]).parts[0]
    monkeypatch.setattr("gateway.media.media_filter.open_image", None)
    second = filters[1].filter_parts_sync([Image(bytes(bytearray(png())))]).parts[0]
    assert first is second and len(store) == 1
    del first, second
    gc.collect()
    assert len(store) == 0
