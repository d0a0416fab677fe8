"""Tests of `process_image` and `process_video`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from gateway.media.process import MAX_ASPECT_RATIO, PixelBounds, fit_size, process_image, process_video
from gateway.media.sniff import MediaError, to_data_uri
from gateway.media.video import FrameSampling, sample_video
from gateway.types import Image
from tests.sample_images import COLORS, animation, encode, plain_image, png

QWEN2, QWEN3 = 28, 32


def processed_size(width: int, height: int, patch: int = 14, **options: Any) -> tuple[int, int]:
    return process_image({"image": plain_image(width, height), **options}, patch).size


def test_sides_are_multiples_of_two_patches() -> None:
    assert processed_size(100, 200) == (112, 196)
    assert processed_size(100, 200, patch=16) == (96, 192)
    assert processed_size(1, 1) == (56, 56)


def test_pixels_stay_within_the_bounds() -> None:
    assert processed_size(1000, 500, max_pixels=16 * QWEN2**2) == (140, 56)
    assert processed_size(28, 28, min_pixels=16 * QWEN2**2) == (112, 112)
    assert fit_size(8000, 4000, PixelBounds(1, 16_384 * QWEN2**2, QWEN2)) == (5068, 2520)


def test_a_size_can_be_given() -> None:
    assert processed_size(10, 10, resized_height=100, resized_width=50) == (56, 112)
    with pytest.raises(MediaError, match="belong together"):
        processed_size(10, 10, resized_height=100)
    with pytest.raises(MediaError, match="`min_pixels` 9999 is more than `max_pixels` 999"):
        processed_size(10, 10, min_pixels=9999, max_pixels=999)


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    factor=st.sampled_from([8, QWEN2, QWEN3]),
    min_tokens=st.integers(1, 200),
    extra_tokens=st.integers(0, 20_000),
)
def test_fitted_sizes_are_multiples_of_the_factor_within_the_bounds(
    width: int, height: int, factor: int, min_tokens: int, extra_tokens: int
) -> None:
    bounds = PixelBounds(min_tokens * factor**2, (4 * min_tokens + 256 + extra_tokens) * factor**2, factor)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        with pytest.raises(MediaError, match="more than 200 times"):
            fit_size(width, height, bounds)
        return
    new_width, new_height = fit_size(width, height, bounds)
    assert new_width % factor == new_height % factor == 0 and min(new_width, new_height) > 0
    assert bounds.min_pixels <= new_width * new_height <= bounds.max_pixels
    assert fit_size(new_width, new_height, bounds) == (new_width, new_height)


@pytest.mark.parametrize("size", [(9, 1605), (1605, 9), (16, 3190)])
def test_rounding_does_not_exceed_the_largest_aspect_ratio(size: tuple[int, int]) -> None:
    bounds = PixelBounds(64, 16640, 8)
    fitted = fit_size(*size, bounds)
    assert max(fitted) == MAX_ASPECT_RATIO * min(fitted) and fit_size(*fitted, bounds) == fitted


def test_a_pil_image_keeps_its_size_and_becomes_rgb_on_white() -> None:
    transparent = Pillow.new("RGBA", (3, 2), (255, 0, 0, 0))
    assert process_image(transparent).size == (3, 2) and process_image(transparent).getpixel((0, 0)) == (255, 255, 255)
    assert process_image(Pillow.new("L", (3, 2))).mode == "RGB"
    palette = Pillow.new("P", (3, 2))
    palette.info["transparency"] = 0
    assert process_image(palette).getpixel((0, 0)) == (255, 255, 255)


def test_an_image_can_be_given_in_every_form_of_verls_rows(tmp_path: Path) -> None:
    file = tmp_path / "an image.png"
    file.write_bytes(png(56, 56))
    uri = to_data_uri(Image(png(56, 56)))
    for image in (
        {"image": str(file)},
        {"image": file},
        {"image": file.as_uri()},
        {"image": uri},
        {"image_url": uri},
        {"type": "image_url", "image_url": {"url": uri}},
        {"bytes": png(56, 56), "path": None},
        {"image": png(56, 56)},
        {"image": np.zeros((56, 56, 3), np.uint8)},
    ):
        assert process_image(image).size == (56, 56)
    with pytest.raises(MediaError, match="one of `image`, `image_url` and `bytes`, but there are 0"):
        process_image({"path": str(file)})
    with pytest.raises(MediaError, match="URLs are not downloaded"):
        process_image({"image": "https://example.org/a.png"})


def color_indices(images: list[Pillow.Image]) -> list[int]:
    """The index in COLORS of each image's color."""
    known = [Pillow.new("RGB", (1, 1), color).getpixel((0, 0)) for color in COLORS]
    return [known.index(image.getpixel((image.width // 2, image.height // 2))) for image in images]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_frames_are_sampled_evenly_from_first_to_last(form: str) -> None:
    data = animation(form, 6, (56, 56), duration_ms=500)
    assert color_indices(process_video({"video": data, "fps": 2})) == [0, 1, 2, 3, 4, 5]
    assert color_indices(process_video({"video": data, "nframes": 2})) == [0, 5]
    assert color_indices(process_video({"video": data}, fps=1.0, fps_min_frames=2)) == [0, 2, 3, 5]
    assert color_indices(process_video({"video": data}, nframes=4)) == [0, 2, 3, 5]
    assert color_indices(process_video({"video": data, "fps": 4})) == [0, 1, 2, 3, 4, 5]
    assert color_indices(process_video({"video": data, "fps": 0.1, "min_frames": 2, "max_frames": 4})) == [0, 5]
    assert len(process_video({"video": animation(form, 1, (56, 56))})) == 1


def test_options_of_the_mapping_override_the_arguments() -> None:
    data = animation("GIF", 6, (56, 56))
    assert len(process_video({"video": data, "nframes": 2}, nframes=6)) == 2
    with pytest.raises(MediaError, match="both determine the number of frames"):
        process_video({"video": data, "nframes": 2, "fps": 1.0})
    for wrong in ({}, {"image": data}, [data]):
        with pytest.raises(MediaError, match="a video needs the keys"):
            process_video(wrong)  # type: ignore[arg-type]


def test_all_given_frames_are_used_and_their_number_made_even(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(56, 56, "green"))
    frames = process_video(
        {"video": [plain_image(56, 56), str(file), {"image": to_data_uri(Image(png(56, 56, "blue")))}]}
    )
    assert color_indices(frames) == [0, 1, 2, 2]
    with pytest.raises(MediaError, match="without frames"):
        process_video({"video": []})
    with pytest.raises(MediaError, match="a single image is not a video"):
        process_video({"video": plain_image()})


def test_frames_of_an_array_are_sampled_evenly() -> None:
    shades = np.stack([np.full((56, 56, 3), shade, np.uint8) for shade in range(8)])
    assert [frame.getpixel((0, 0))[0] for frame in process_video({"video": shades, "nframes": 4})] == [0, 2, 5, 7]


def test_frames_can_be_returned_with_metadata_and_rate() -> None:
    data = animation("GIF", 8, (56, 56), duration_ms=250)
    (frames, metadata), rate = process_video(
        {"video": data}, nframes=4, return_video_sample_fps=True, return_video_metadata=True
    )
    assert len(frames) == 4 and rate == 2.0
    assert metadata == {"fps": 4.0, "frames_indices": [0, 2, 5, 7], "total_num_frames": 8}


def test_frames_share_the_total_pixels_of_a_video() -> None:
    default = process_video({"video": [plain_image(2000, 2000)] * 2})
    assert default[0].size == (756, 756)
    fewer = process_video({"video": [plain_image(2000, 2000)] * 2, "total_pixels": 300 * QWEN2**2})
    assert fewer[0].size == (476, 476)
    small = process_video({"video": [plain_image(2000, 2000)] * 2, "max_pixels": 4 * QWEN2**2})
    assert small[0].size == (56, 56)


def test_frames_of_different_durations_are_sampled_by_time() -> None:
    """Red for 0.1 s, green for 0.9 s, blue for 0.1 s."""
    file = io.BytesIO()
    red, green, blue = (plain_image(8, 8, color) for color in COLORS[:3])
    red.save(file, "GIF", save_all=True, append_images=[green, blue], duration=[100, 900, 100])
    sampled = sample_video(file.getvalue(), FrameSampling(frame_count=3))
    assert color_indices(list(sampled.images)) == [0, 1, 2] and sampled.duration_s == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes that are not a video"),
        (b"ID3", "but audio/mpeg"),
        (animation("GIF", 30, (40, 40)), "30 frames of 40x40 pixels, together more than"),
    ],
)
def test_data_that_is_no_video_or_too_large_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        sample_video(data, FrameSampling(frame_count=30), max_pixels=40_000)


def test_a_video_with_too_many_frames_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.media.video.MAX_VIDEO_FRAMES", 5)
    with pytest.raises(MediaError, match="with 5 frames or more"):
        sample_video(animation("GIF", 6), FrameSampling())


def test_an_mp4_is_decoded_if_pyav_is_installed() -> None:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for color in ("red", "red", "blue", "blue", "blue", "blue", "red", "red"):
            for packet in stream.encode(av.VideoFrame.from_image(plain_image(64, 64, color))):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    frames = process_video({"video": file.getvalue()}, nframes=4)
    reds = [frame.getpixel((32, 32))[0] > 128 for frame in frames]
    assert reds == [True, False, False, True] and frames[0].size[0] % QWEN2 == 0
    with pytest.raises(MediaError, match="not a readable video"):
        process_video({"video": file.getvalue()[:200]})


def test_an_mp4_names_the_extra_if_pyav_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"pip install 'mtrl-rl\[video\]'"):
        process_video({"video": b"\0\0\0\x18ftypisom"})


def test_a_still_image_is_a_video_of_one_frame() -> None:
    assert len(process_video({"video": encode(plain_image(56, 56), "JPEG")})) == 1
