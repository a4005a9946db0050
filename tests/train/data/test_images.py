"""CIFAR-10 files, folders of images and embedded images: what is read, what is refused, what is random."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from oktopk.train.data.images.cifar import (
    CLASSES,
    SCALE,
    TEST_FILE,
    TRAIN_FILES,
    import_cifar,
    read_cifar,
    write_cifar,
)
from oktopk.train.data.images.dataset import ImageSet, InMemoryImages, shift_and_mirror
from oktopk.train.data.images.folders import FolderImages, ImageFile, centre_box, random_box, read_image_folder
from oktopk.train.data.images.synthetic import embedded_images
from oktopk.train.data.problems import DataError
from tests.support.paths import DATA

Image = pytest.importorskip("PIL.Image", reason="reads and writes image files")

Split = tuple[np.ndarray, np.ndarray]
RECORD = 3073


def random_split(count: int, seed: int = 0, size: int = 32) -> Split:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 3, size, size), dtype=np.uint8), np.arange(count) % 10


def encoded(
    colour: tuple[int, int, int] | np.ndarray, size: tuple[int, int] = (32, 32), kind: str = "JPEG"
) -> bytes:
    image = Image.fromarray(colour) if isinstance(colour, np.ndarray) else Image.new("RGB", size, colour)
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def colour_of(label: int) -> tuple[int, int, int]:
    return 20 * label, 255 - 20 * label, 100


def unpack(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def pack(files: dict[str, bytes], path: Path, mode: str = "w:xz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def same(one: ImageSet, other: ImageSet) -> bool:
    batches = [images.batch(range(len(images))) for images in (one, other)]
    return torch.equal(batches[0].images, batches[1].images) and torch.equal(batches[0].labels, batches[1].labels)


# --- CIFAR-10, binary ---


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
@pytest.mark.parametrize("count", [5, 23])
def test_what_is_written_is_read(tmp_path: Path, inner: str, count: int) -> None:
    train, test = random_split(count), random_split(7, seed=1)
    write_cifar(tmp_path / inner, *train, *test)
    read_train, read_test = read_cifar(tmp_path)
    assert same(read_train, InMemoryImages(*train))
    assert same(read_test, InMemoryImages(*test))
    assert sorted(path.name for path in (tmp_path / inner).iterdir()) == sorted((*TRAIN_FILES, TEST_FILE))


def test_a_record_is_the_label_and_then_the_channels(tmp_path: Path) -> None:
    images, labels = random_split(5)
    write_cifar(tmp_path, images, labels, images, labels)
    record = (tmp_path / "data_batch_4.bin").read_bytes()
    assert record == bytes([3]) + images[3, 0].tobytes() + images[3, 1].tobytes() + images[3, 2].tobytes()


@pytest.mark.parametrize("length", [0, 1, RECORD - 1, RECORD + 1])
@pytest.mark.parametrize("name", [TRAIN_FILES[2], TEST_FILE])
def test_a_cut_file_is_named(tmp_path: Path, name: str, length: int) -> None:
    write_cifar(tmp_path, *random_split(10), *random_split(2))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:length])
    with pytest.raises(DataError, match=rf"{name}: .* bytes are not whole records of 3,073.*again"):
        read_cifar(tmp_path)


def test_a_label_beyond_the_classes_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path, *random_split(10), *random_split(2))
    path = tmp_path / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    content[RECORD] = 11
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_2.bin: record 1 has label 11, expected a label below 10"):
        read_cifar(tmp_path)


def test_missing_files_and_folders_say_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such folder; .*oktopk data cifar10"):
        read_cifar(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"neither data_batch_1\.bin nor cifar-10-batches-bin in it"):
        read_cifar(tmp_path)
    write_cifar(tmp_path, *random_split(10), *random_split(2))
    (tmp_path / "data_batch_5.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_5\.bin missing"):
        read_cifar(tmp_path)


@pytest.mark.parametrize("labels", [np.array([0, 1, 2, 3, 10]), np.array([0, 1, 2, 3, -1]), np.arange(4)])
def test_labels_are_checked_before_anything_is_written(tmp_path: Path, labels: np.ndarray) -> None:
    with pytest.raises(DataError, match="from 0 to 9"):
        write_cifar(tmp_path / "new", *random_split(5), random_split(5)[0], labels)
    assert not (tmp_path / "new").exists()


# --- CIFAR-10, import ---


def jpeg_corpus() -> dict[str, bytes]:
    return {
        f"{split}/{name}/{number:04d}.jpg": encoded(colour_of(label))
        for split, count in (("train", 2), ("test", 1))
        for label, name in enumerate(CLASSES)
        for number in range(count)
    }


@pytest.mark.parametrize("kind", ["w:xz", "w:gz", "folder", "inner folder"])
def test_import_keeps_every_image_with_its_class(tmp_path: Path, kind: str) -> None:
    files = {"README.md": b"about\n", **jpeg_corpus()}
    if kind == "inner folder":
        files = {f"CIFAR/{name}": content for name, content in files.items()}
    source = unpack(files, tmp_path / "in") if "folder" in kind else pack(files, tmp_path / "in.tar", kind)
    calls: list[tuple[int, int]] = []
    summary = import_cifar(source, tmp_path / "out", lambda done, total: calls.append((done, total)))
    assert (summary.train, summary.test, summary.problems) == (20, 10, ())
    assert calls == [(done, 30) for done in range(1, 31)]
    for images in read_cifar(tmp_path / "out"):
        batch = images.batch(range(len(images)))
        wanted = torch.tensor([colour_of(int(label)) for label in batch.labels])
        assert (batch.images.float().mean((2, 3)) - wanted).abs().max() < 4
        assert batch.labels.bincount().tolist() == [len(images) // 10] * 10


def test_import_lists_what_is_broken_and_keeps_the_rest(tmp_path: Path) -> None:
    good = jpeg_corpus()
    bad = {
        "train/cat/text.jpg": b"not an image at all\n",
        "train/cat/empty.jpg": b"",
        "train/cat/cut.jpg": encoded(random_split(1)[0][0].transpose(1, 2, 0))[:-300],
        "train/cat/large.png": encoded((1, 2, 3), (33, 32), "PNG"),
        "train/zebra/0000.jpg": encoded((1, 2, 3)),
    }
    summary = import_cifar(pack(good | bad, tmp_path / "in.tar.xz"), tmp_path / "out")
    assert sorted(problem.where for problem in summary.problems) == sorted(bad)
    assert (summary.train, summary.test) == (20, 10)
    assert "33×32 pixels instead of 32×32" in "\n".join(map(str, summary.problems))


def test_import_refuses_what_is_not_the_corpus_and_writes_nothing(tmp_path: Path) -> None:
    only_train = {name: content for name, content in jpeg_corpus().items() if name.startswith("train")}
    for source, message in (
        (pack(only_train, tmp_path / "in.tar.xz"), "20 training and 0 test images"),
        (tmp_path / "nowhere.tar", "no such archive or folder"),
    ):
        with pytest.raises(DataError, match=message):
            import_cifar(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_cut_archive_is_refused_unless_all_images_are_in_it(tmp_path: Path, mode: str) -> None:
    whole = pack(jpeg_corpus(), tmp_path / "whole.tar", mode).read_bytes()
    refused: list[str] = []
    for length in (5, *range(0, len(whole), len(whole) // 40)):
        (tmp_path / "cut.tar").write_bytes(whole[:length])
        try:
            summary = import_cifar(tmp_path / "cut.tar", tmp_path / "out")
        except DataError as error:
            refused.append(str(error))
        else:  # only zeros were cut off
            assert (summary.train, summary.test, summary.problems) == (20, 10, ())
    assert len(refused) > 20
    assert all("incomplete or damaged tar archive" in message for message in refused)


def test_the_real_archive_has_the_layout_that_is_imported(tmp_path: Path) -> None:
    """Its first 1100 images; the whole takes half a minute."""
    archive = DATA / "cifar10_jpeg_60000.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{archive} is not here; OKTOPK_DATA names the folder it is in")
    files: dict[str, bytes] = {}
    with tarfile.open(archive, "r|*") as members:
        for member in members:
            content = members.extractfile(member) if member.isreg() else None
            if content is not None:
                files[member.name] = content.read()
            if len(files) > 1100:
                break
    trains = {name.replace("test/", "train/"): content for name, content in files.items()}
    summary = import_cifar(pack(files | trains, tmp_path / "in.tar", "w"), tmp_path / "out")
    assert (summary.train, summary.test, summary.problems) == (1100, 1100, ())
    test = read_cifar(tmp_path / "out")[1]
    assert test.labels.bincount().tolist() == [1000, 100]


# --- augmentation ---


def test_a_shift_moves_by_whole_pixels_over_black() -> None:
    images = torch.from_numpy(random_split(2)[0])
    shifted = shift_and_mirror(images, 4, torch.tensor([[4, 4], [0, 7]]), torch.tensor([False, False]))
    assert torch.equal(shifted[0], images[0])
    assert torch.equal(shifted[1, :, 4:, :-3], images[1, :, :-4, 3:])
    assert not shifted[1, :, :4].any()
    assert not shifted[1, :, :, -3:].any()


def test_a_mirrored_image_is_shifted_first() -> None:
    images, shifts = torch.from_numpy(random_split(3)[0]), torch.tensor([[0, 8], [3, 2], [4, 4]])
    plain, mirrored = (shift_and_mirror(images, 4, shifts, torch.full((3,), flip)) for flip in (False, True))
    assert torch.equal(plain.flip(-1), mirrored)


def folder_images(folder: Path, count: int, seed: int = 0) -> FolderImages:
    random = np.random.default_rng(0)
    files = []
    for number in range(count):
        pixels = random.integers(0, 256, (20 + 3 * number, 30, 3), dtype=np.uint8)
        path = unpack({f"{number}.png": encoded(pixels, kind="PNG")}, folder) / f"{number}.png"
        files.append(ImageFile(path, number % 3))
    return FolderImages(files, size=16, seed=seed)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_augmentation_depends_on_seed_epoch_and_sample_only(tmp_path: Path, kind: str) -> None:
    def images(seed: int = 0) -> ImageSet:
        return InMemoryImages(*random_split(6), seed) if kind == "memory" else folder_images(tmp_path, 6, seed)

    batch = images().batch([0, 1, 2, 3, 4, 5], epoch=3)
    again = images().batch([4, 2], epoch=3)
    assert torch.equal(again.images, batch.images[[4, 2]])
    assert torch.equal(again.labels, batch.labels[[4, 2]])
    for other in (images().batch(range(6), epoch=4), images(seed=1).batch(range(6), epoch=3)):
        assert not torch.equal(other.images, batch.images)
    assert torch.equal(images().batch(range(6)).images, images(seed=1).batch(range(6)).images)


def test_every_shift_and_both_sides_come(tmp_path: Path) -> None:
    """A white image shows where it was shifted to; over many samples all 81 places are taken."""
    white = InMemoryImages(np.full((1500, 3, 32, 32), 255, dtype=np.uint8), np.zeros(1500, dtype=np.int64))
    black = white.batch(range(1500), epoch=0).images[:, 0] == 0
    edges = (black[:, 16].sum(1), black[:, :, 16].sum(1))
    assert all(set(edge.tolist()) == set(range(5)) for edge in edges)
    left = black[:, 16, 0].float().mean().item()
    assert left == pytest.approx(4 / 9, abs=0.06)


def test_scaling_gives_mean_0_and_deviation_1_for_the_constants() -> None:
    mean = torch.tensor(SCALE.mean).mul(255).round().to(torch.uint8).view(1, 3, 1, 1)
    assert SCALE(mean).abs().max() < 0.01
    one_above = (torch.tensor(SCALE.mean) + torch.tensor(SCALE.deviation)).mul(255).round().to(torch.uint8)
    assert (SCALE(one_above.view(1, 3, 1, 1)) - 1).abs().max() < 0.01


# --- folders of images ---


def small_folder() -> dict[str, bytes]:
    return {
        "train/ant/1.jpg": encoded((250, 0, 0), (40, 60)),
        "train/ant/deeper/2.PNG": encoded((250, 0, 0), (50, 30), "PNG"),
        "train/bee/1.jpeg": encoded((0, 250, 0), (300, 260)),
        "train/bee/notes.txt": b"left by somebody\n",
        "train/cow/1.bmp": encoded((0, 0, 250), (1, 1), "BMP"),
        "val/bee/1.jpg": encoded((0, 250, 0), (400, 100)),
    }


def test_classes_are_numbered_by_name(tmp_path: Path) -> None:
    found = read_image_folder(unpack(small_folder(), tmp_path))
    assert found.classes == ("ant", "bee", "cow")
    train, val = found.train.batch(range(4), epoch=0), found.val.batch([0])
    assert train.labels.tolist() == [0, 0, 1, 2]
    assert val.labels.tolist() == [1]
    assert train.images.shape == (4, 3, 224, 224)
    for batch in (train, val):
        assert batch.images.float().mean((2, 3)).argmax(1).tolist() == batch.labels.tolist()
    assert not found.train.problems


def test_broken_files_and_empty_classes_are_listed_and_the_rest_is_kept(tmp_path: Path) -> None:
    bad = {
        "train/ant/text.jpg": b"this is text\n",
        "train/bee/empty.png": b"",
        "val/bee/text.gif": b"GIF of a kind",
    }
    folder = unpack(small_folder() | bad, tmp_path)
    (folder / "train" / "dog").mkdir()
    (folder / "train" / "cow" / "gone.jpg").symlink_to("nowhere.jpg")
    found = read_image_folder(folder)
    listed = {Path(problem.where).relative_to(folder).as_posix() for problem in found.train.problems}
    assert listed == {"train/ant/text.jpg", "train/bee/empty.png", "train/dog", "train/cow/gone.jpg"}
    assert [Path(problem.where).name for problem in found.val.problems] == ["text.gif"]
    assert (len(found.train), len(found.val)) == (4, 1)
    assert found.classes == ("ant", "bee", "cow", "dog")


def test_an_image_that_turns_out_broken_is_named(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    cut = {"train/ant/cut.jpg": encoded(pixels)[:2000], "train/ant/cut.png": encoded(pixels, kind="PNG")[:2000]}
    found = read_image_folder(unpack({**cut, "val/ant/1.jpg": encoded((0, 0, 0))}, tmp_path))
    assert len(found.train) == 2
    for index, name in enumerate(["cut.jpg", "cut.png"]):
        with pytest.raises(DataError, match=name):
            found.train.batch([index], epoch=0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"val/cat/1.jpg": b""}, "val: classes missing from .*train: cat"),
        ({"val/bee/1.jpg": b"text"}, "val: no usable images\n.*1.jpg: not an image"),
    ],
)
def test_a_validation_that_cannot_be_used_is_refused(tmp_path: Path, more: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_image_folder(unpack(small_folder() | more, tmp_path))


def test_missing_folders_say_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train: No such file or directory; expected train/<class>"):
        read_image_folder(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train: no folders found"):
        read_image_folder(tmp_path)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_any_kind_of_pixels_becomes_three_channels(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "image.tif"
    Image.new("RGB", (20, 20), (255, 255, 255)).convert(mode).save(path)
    assert (FolderImages([ImageFile(path, 0)], size=8).batch([0]).images == 255).all()


@pytest.mark.parametrize("size", [(224, 224), (500, 333), (1, 1), (2, 900), (900, 2)])
def test_random_boxes_stay_inside(size: tuple[int, int]) -> None:
    width, height = size
    random = np.random.default_rng(0)
    for _ in range(300):
        left, upper, right, lower = random_box(width, height, random)
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= height
        if min(size) > 200:
            share, ratio = (right - left) * (lower - upper) / (width * height), (right - left) / (lower - upper)
            assert 0.075 < share <= 1
            assert 0.73 < ratio < 1.37


def test_the_centre_is_what_resizing_to_256_and_cutting_224_leaves() -> None:
    assert centre_box(256, 256) == (16, 16, 240, 240)
    assert centre_box(100, 256) == (6.25, 84.25, 93.75, 171.75)


# --- embedded images ---


@pytest.mark.parametrize(("train", "val", "size"), [(1000, 200, 32), (128, 32, 64)])
def test_embedded_classes_can_be_learned(train: int, val: int, size: int) -> None:
    seen, new = (embedded_images(split, n, size).batch(range(n)) for split, n in (("train", train), ("val", val)))
    means = torch.stack([seen.images[seen.labels == label].float().mean(0) for label in range(10)]).flatten(1)
    guess = torch.cdist(new.images.float().flatten(1), means).argmin(1)
    accuracy = (guess == new.labels).float().mean().item()
    assert 0.7 < accuracy < 1.0


def test_embedded_images_are_always_the_same() -> None:
    short, long = embedded_images("train", 30, 32), embedded_images("train", 600, 32)
    assert torch.equal(short.images, long.images[:30])
    assert len(torch.unique(long.images.flatten(1), dim=0)) == 600
    assert not torch.equal(short.images, embedded_images("val", 30, 32).images)
    assert long.labels.bincount().tolist() == [60] * 10
