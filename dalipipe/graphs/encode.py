"""Images encoded again on a GPU: decoded, shrunk and written as JPEG by nvImageCodec and nvJPEG without leaving it.

The same code runs on the CPU operators of nvImageCodec, which is how it is tested without a card. Not measured on one.
"""

from __future__ import annotations

import functools
from typing import Any

from dalipipe.errors import ConfigError, CorruptSampleError, DependencyError


def shrink(data: memoryview, *, short_side: int, quality: int, device: str) -> tuple[bytes, int, int]:
    """(JPEG, height, width) of an encoded image, upright, its short side shrunk to `short_side` (0: kept).

    Args:
        quality: 1 to 100. device: `cuda:N`, or `cpu` for the twin without a card.

    Raises:
        ConfigError: there is no such GPU. DependencyError: nvImageCodec is missing.
        CorruptSampleError: the image cannot be decoded.
    """
    import torch

    codec = _codec(device)
    pixels = codec.decode(bytes(data))
    height, width = int(pixels.shape[0]), int(pixels.shape[1])
    if short_side:
        scale = short_side / min(height, width)
        height, width = max(short_side, round(height * scale)), max(short_side, round(width * scale))
        planes = pixels.permute(2, 0, 1)[None].float()
        shrunk = torch.nn.functional.interpolate(planes, (height, width), mode="bicubic", antialias=True)
        pixels = shrunk[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).contiguous()
    return codec.encode(pixels, quality), height, width


class _Codec:
    """Decoder and encoder of one device."""

    def __init__(self, nvimgcodec: Any, index: int | None) -> None:
        self._nvimgcodec = nvimgcodec
        where: dict[str, Any] = {"device_id": index}
        if index is None:
            where["device_id"] = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
            where["backends"] = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        self._on_cpu = index is None
        self._decoder = nvimgcodec.Decoder(**where)
        self._encoder = nvimgcodec.Encoder(**where)

    def decode(self, data: bytes) -> Any:
        """A torch tensor on the device, uint8 HWC RGB, upright."""
        import numpy as np
        import torch.utils.dlpack

        image = self._decoder.decode(data)
        if image is None:
            raise CorruptSampleError("nvImageCodec cannot decode it")
        # Without a driver its DLPack fails even for images in host memory.
        return torch.from_numpy(np.array(image)) if self._on_cpu else torch.utils.dlpack.from_dlpack(image)

    def encode(self, pixels: Any, quality: int) -> bytes:
        """The JPEG of such a tensor."""
        import torch

        params = self._nvimgcodec.EncodeParams(quality_type=self._nvimgcodec.QualityType.QUALITY, quality_value=quality)
        if self._on_cpu:
            source, stream = self._nvimgcodec.as_image(pixels.numpy()), 0
        else:
            source, stream = self._nvimgcodec.as_image(pixels), torch.cuda.current_stream(pixels.device).cuda_stream
        encoded = self._encoder.encode(source, "jpeg", params=params, cuda_stream=stream)
        if encoded is None:
            raise CorruptSampleError("nvImageCodec cannot encode it again")
        return bytes(encoded)


@functools.cache
def _codec(device: str) -> _Codec:
    import torch

    try:
        from nvidia import nvimgcodec
    except ImportError as error:
        raise DependencyError(f"pack.device={device} needs nvImageCodec ({error}); install a CUDA flavour") from error
    if device == "cpu":
        return _Codec(nvimgcodec, None)
    if not torch.cuda.is_available():
        raise ConfigError(f"pack.device={device!r} but torch sees no GPU; use pack.device=cpu, or mend the driver")
    return _Codec(nvimgcodec, torch.device(device).index or 0)
