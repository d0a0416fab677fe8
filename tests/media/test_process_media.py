"""Tests of `process_image` and `process_video`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from gateway.media.process import MAX_ASPECT_RATIO, PixelBounds, fit_size, process_image, process_video
from gateway.media.sniff import MediaError, to_data_uri
from gateway.media.video import FrameSampling, sample_video
from gateway.types import Image
from tests.sample_images import COLORS, animation, plain_image, png

QWEN2, QWEN3 = 28, 32


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


def test_frames_share_the_total_pixels_of_a_video() -> None:
    default = process_video({"video": [plain_image(2000, 2000)] * 2})
    assert default[0].size == (756, 756)
    fewer = process_video({"video": [plain_image(2000, 2000)] * 2, "total_pixels": 300 * QWEN2**2})
    assert fewer[0].size == (476, 476)
    small = process_video({"video": [plain_image(2000, 2000)] * 2, "max_pixels": 4 * QWEN2**2})
    assert small[0].size == (56, 56)


def test_size_and_frames_may_be_given_and_contradictions_are_refused() -> None:
    assert process_image({"image": plain_image(10, 10), "resized_height": 100, "resized_width": 50}).size == (56, 112)
    assert process_image(Pillow.new("RGBA", (3, 2), (255, 0, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    video = {"video": animation("GIF", 8, (56, 56), duration_ms=250)}
    (frames, metadata), rate = process_video(
        {**video, "nframes": 4}, nframes=6, return_video_sample_fps=True, return_video_metadata=True
    )
    assert (len(frames), rate) == (4, 2.0)
    assert metadata == {"fps": 4.0, "frames_indices": [0, 2, 5, 7], "total_num_frames": 8}
    shades = np.stack([np.full((56, 56, 3), shade, np.uint8) for shade in range(8)])
    assert [frame.getpixel((0, 0))[0] for frame in process_video({"video": shades, "nframes": 4})] == [0, 2, 5, 7]
    for wrong, message in (
        ({**video, "nframes": 2, "fps": 1.0}, "both determine the number of frames"),
        ({**video, "resized_height": 100}, "belong together"),
        ({**video, "min_pixels": 9999, "max_pixels": 999}, "`min_pixels` 9999 is more than `max_pixels` 999"),
        ({"image": b""}, "a video needs the keys"),
    ):
        with pytest.raises(MediaError, match=message):
            process_video(wrong)


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
