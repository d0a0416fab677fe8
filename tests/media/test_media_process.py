"""`process_image` and `process_video` take the words that vision trainers know, and give what a model takes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from gateway.media.film import Sampling, frames
from gateway.media.kind import MediaError, data_uri
from gateway.media.process import process_image, process_video
from gateway.media.sizes import MOST_ASPECT, Bounds, fitted
from gateway.types import Image
from tests.drawn import COLORS, moving, plain, png, saved

QWEN2, QWEN3 = 28, 32


def process(width: int, height: int, patch: int = 14, **asked: Any) -> tuple[int, int]:
    return process_image({"image": plain(width, height), **asked}, patch).size


def test_sides_become_multiples_of_two_patches() -> None:
    assert process(100, 200) == (112, 196)
    assert process(100, 200, patch=16) == (96, 192)
    assert process(1, 1) == (56, 56)


def test_pixels_are_held_within_bounds() -> None:
    assert process(1000, 500, max_pixels=16 * QWEN2**2) == (140, 56)
    assert process(28, 28, min_pixels=16 * QWEN2**2) == (112, 112)
    assert fitted(8000, 4000, Bounds(1, 16_384 * QWEN2**2, QWEN2)) == (5068, 2520)


def test_a_size_may_be_asked_for() -> None:
    assert process(10, 10, resized_height=100, resized_width=50) == (56, 112)
    with pytest.raises(MediaError, match="go together"):
        process(10, 10, resized_height=100)
    with pytest.raises(MediaError, match="`min_pixels` 9999 is more than `max_pixels` 999"):
        process(10, 10, min_pixels=9999, max_pixels=999)


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    factor=st.sampled_from([8, QWEN2, QWEN3]),
    least=st.integers(1, 200),
    more=st.integers(0, 20_000),
)
def test_sides_that_fit_are_multiples_within_bounds_in_nearly_the_same_aspect(
    width: int, height: int, factor: int, least: int, more: int
) -> None:
    bounds = Bounds(least * factor**2, (4 * least + 256 + more) * factor**2, factor)
    if max(width, height) > MOST_ASPECT * min(width, height):
        with pytest.raises(MediaError, match="more than 200 times"):
            fitted(width, height, bounds)
        return
    wide, high = fitted(width, height, bounds)
    assert wide % factor == high % factor == 0 and min(wide, high) > 0
    assert bounds.min_pixels <= wide * high <= bounds.max_pixels
    assert fitted(wide, high, bounds) == (wide, high)


@pytest.mark.parametrize("sides", [(9, 1605), (1605, 9), (16, 3190)])
def test_a_picture_that_is_barely_not_too_long_is_not_made_too_long_by_rounding(sides: tuple[int, int]) -> None:
    bounds = Bounds(64, 16640, 8)
    fits = fitted(*sides, bounds)
    assert max(fits) == MOST_ASPECT * min(fits) and fitted(*fits, bounds) == fits


def test_a_picture_of_pillows_keeps_its_size_and_is_red_green_and_blue_on_white() -> None:
    clear = Pillow.new("RGBA", (3, 2), (255, 0, 0, 0))
    assert process_image(clear).size == (3, 2) and process_image(clear).getpixel((0, 0)) == (255, 255, 255)
    assert process_image(Pillow.new("L", (3, 2))).mode == "RGB"
    palette = Pillow.new("P", (3, 2))
    palette.info["transparency"] = 0
    assert process_image(palette).getpixel((0, 0)) == (255, 255, 255)


def test_a_picture_may_come_in_every_form_that_trainers_know(tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(png(56, 56))
    uri = data_uri(Image(png(56, 56)))
    for asked in (
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
        assert process_image(asked).size == (56, 56)
    with pytest.raises(MediaError, match="one of `image`, `image_url` and `bytes`, and here are 0"):
        process_image({"path": str(file)})
    with pytest.raises(MediaError, match="is not fetched"):
        process_image({"image": "https://example.org/a.png"})


def colors(pictures: list[Pillow.Image]) -> list[int]:
    """Which of the colors that tests paint with each is, by its middle."""
    painted = [Pillow.new("RGB", (1, 1), color).getpixel((0, 0)) for color in COLORS]
    return [painted.index(one.getpixel((one.width // 2, one.height // 2))) for one in pictures]


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_a_film_is_looked_at_evenly_from_first_to_last(form: str) -> None:
    data = moving(form, 6, (56, 56), duration_ms=500)
    assert colors(process_video({"video": data, "fps": 2})) == [0, 1, 2, 3, 4, 5]
    assert colors(process_video({"video": data, "nframes": 2})) == [0, 5]
    assert colors(process_video({"video": data}, fps=1.0, fps_min_frames=2)) == [0, 2, 3, 5]
    assert colors(process_video({"video": data}, nframes=4)) == [0, 2, 3, 5]
    assert colors(process_video({"video": data, "fps": 4})) == [0, 1, 2, 3, 4, 5]
    assert colors(process_video({"video": data, "fps": 0.1, "min_frames": 2, "max_frames": 4})) == [0, 5]
    assert len(process_video({"video": moving(form, 1, (56, 56))})) == 1


def test_what_a_mapping_asks_for_goes_before_the_arguments() -> None:
    data = moving("GIF", 6, (56, 56))
    assert len(process_video({"video": data, "nframes": 2}, nframes=6)) == 2
    with pytest.raises(MediaError, match="both say how many"):
        process_video({"video": data, "nframes": 2, "fps": 1.0})
    for wrong in ({}, {"image": data}, [data]):
        with pytest.raises(MediaError, match="a film is given as"):
            process_video(wrong)  # type: ignore[arg-type]


def test_frames_are_kept_all_and_made_even(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(56, 56, "green"))
    seen = process_video({"video": [plain(56, 56), str(file), {"image": data_uri(Image(png(56, 56, "blue")))}]})
    assert colors(seen) == [0, 1, 2, 2]
    with pytest.raises(MediaError, match="without frames"):
        process_video({"video": []})
    with pytest.raises(MediaError, match="a single picture is no film"):
        process_video({"video": plain()})


def test_frames_of_an_array_are_looked_at_by_their_number() -> None:
    shades = np.stack([np.full((56, 56, 3), shade, np.uint8) for shade in range(8)])
    assert [one.getpixel((0, 0))[0] for one in process_video({"video": shades, "nframes": 4})] == [0, 2, 5, 7]


def test_a_film_may_come_with_its_times() -> None:
    data = moving("GIF", 8, (56, 56), duration_ms=250)
    (seen, told), rate = process_video(
        {"video": data}, nframes=4, return_video_sample_fps=True, return_video_metadata=True
    )
    assert len(seen) == 4 and rate == 2.0
    assert told == {"fps": 4.0, "frames_indices": [0, 2, 5, 7], "total_num_frames": 8}


def test_frames_share_the_pixels_of_a_film() -> None:
    one = process_video({"video": [plain(2000, 2000)] * 2})
    assert one[0].size == (756, 756)
    many = process_video({"video": [plain(2000, 2000)] * 2, "total_pixels": 300 * QWEN2**2})
    assert many[0].size == (476, 476)
    small = process_video({"video": [plain(2000, 2000)] * 2, "max_pixels": 4 * QWEN2**2})
    assert small[0].size == (56, 56)


def test_frames_that_stand_for_different_times_are_met_by_time() -> None:
    """Red for a tenth of a second, green for nine, blue for a tenth."""
    film = io.BytesIO()
    red, green, blue = (plain(8, 8, color) for color in COLORS[:3])
    red.save(film, "GIF", save_all=True, append_images=[green, blue], duration=[100, 900, 100])
    seen = frames(film.getvalue(), Sampling(frames=3))
    assert colors(list(seen.pictures)) == [0, 1, 2] and seen.seconds == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that are no film"),
        (b"ID3", "but audio/mpeg"),
        (moving("GIF", 30, (40, 40)), "30 frames of 40x40 pixels, together more than"),
    ],
)
def test_what_is_no_film_or_too_large_a_one_says_so(data: bytes, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        frames(data, Sampling(frames=30), most_pixels=40_000)


def test_a_film_with_too_many_frames_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.media.film.MOST_FRAMES", 5)
    with pytest.raises(MediaError, match="with 5 frames or more"):
        frames(moving("GIF", 6), Sampling())


def test_a_film_in_a_file_is_decoded_where_the_extra_is_there() -> None:
    av = pytest.importorskip("av")
    held = io.BytesIO()
    with av.open(held, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for color in ("red", "red", "blue", "blue", "blue", "blue", "red", "red"):
            for packet in stream.encode(av.VideoFrame.from_image(plain(64, 64, color))):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    seen = process_video({"video": held.getvalue()}, nframes=4)
    reds = [one.getpixel((32, 32))[0] > 128 for one in seen]
    assert reds == [True, False, False, True] and seen[0].size[0] % QWEN2 == 0
    with pytest.raises(MediaError, match="not a readable film"):
        process_video({"video": held.getvalue()[:200]})


def test_a_film_in_a_file_names_the_extra_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MediaError, match=r"pip install -e '\.\[video\]'"):
        process_video({"video": b"\0\0\0\x18ftypisom"})


def test_a_still_in_place_of_a_film_is_one_frame() -> None:
    assert len(process_video({"video": saved(plain(56, 56), "JPEG")})) == 1
