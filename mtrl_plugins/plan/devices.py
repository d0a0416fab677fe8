"""A table of devices: memory and peak speeds as their makers' data sheets state them, and what of it is expected."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import ConfigError

COMPUTE_EFFICIENCY = 0.35
"""The share of the peak arithmetic that updates and prefill are expected to reach. An assumption, not measured here."""
BANDWIDTH_EFFICIENCY = 0.7
"""The share of the peak memory bandwidth that decoding is expected to reach. An assumption, not measured here."""
NETWORK_BYTES_PER_S = 25e9
"""Between machines, for each device: half of a 400 Gbit/s port. An assumption; it depends on the cluster."""
DEVICES_PER_MACHINE = 8
CPU = "cpu"
"""The name that stands for the machine of a measured run."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device, with the peak figures of its data sheet."""

    name: str
    memory: float
    """Bytes."""
    flops: float
    """Dense bfloat16 operations per second, without sparsity."""
    bandwidth: float
    """Bytes per second from its memory."""
    link: float
    """Bytes per second and direction to devices of the same machine."""
    source: str

    def link_to(self, devices: int) -> float:
        """Bytes per second and direction where this many devices take part."""
        return self.link if devices <= DEVICES_PER_MACHINE else min(self.link, NETWORK_BYTES_PER_S)


DEVICES = {
    device.name: device
    for device in (
        Device("a100-40gb", 40e9, 312e12, 1.555e12, 300e9, "NVIDIA A100 data sheet, SXM 40 GB"),
        Device("a100", 80e9, 312e12, 2.039e12, 300e9, "NVIDIA A100 data sheet, SXM 80 GB"),
        Device("h100", 80e9, 989e12, 3.35e12, 450e9, "NVIDIA H100 data sheet, SXM"),
        Device("h200", 141e9, 989e12, 4.8e12, 450e9, "NVIDIA H200 data sheet, SXM"),
        Device("b200", 180e9, 2250e12, 7.7e12, 900e9, "NVIDIA DGX B200 data sheet, an eighth of the system"),
        Device("l40s", 48e9, 362e12, 864e9, 32e9, "NVIDIA L40S data sheet, PCIe 4"),
        Device("l4", 24e9, 121e12, 300e9, 32e9, "NVIDIA L4 data sheet, PCIe 4"),
        Device("mi300x", 192e9, 1307e12, 5.3e12, 448e9, "AMD Instinct MI300X data sheet"),
    )
}


def find_device(name: str) -> Device:
    """The device of this name. Raises ConfigError with all names."""
    device = DEVICES.get(name.lower())
    if device is None:
        remedy = f"name one of {', '.join(DEVICES)}; or {CPU}, for the machine of a measured run"
        raise ConfigError(f"{name!r} is no device that is known", field="--device", remedy=remedy)
    return device
