"""Models for small images: the paper's ResNet18 and VGG16 in their CIFAR form, and three that train on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cocod_accel.tasks.gpt import gpt

Shape = tuple[int, ...]


def _conv_bn(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv_bn(inputs, outputs, stride), nn.ReLU(inplace=True), *_conv_bn(outputs, outputs))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_conv_bn(inputs, outputs, stride, size=1))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def _resnet(shape: Shape, num_classes: int, widths: list[int], blocks: int, stem_stride: int = 1) -> nn.Module:
    layers: list[nn.Module] = [*_conv_bn(shape[0], widths[0], stem_stride), nn.ReLU(inplace=True)]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Block(inputs, width, stride=2 if stage > 0 and block == 0 else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def resnet18(shape: Shape, num_classes: int) -> nn.Module:
    """ResNet18 for 32x32 images: a 3x3 stem without pooling; 11.2 M parameters for 10 classes."""
    return _resnet(shape, num_classes, [64, 128, 256, 512], blocks=2)


def small_resnet(shape: Shape, num_classes: int) -> nn.Module:
    """A ResNet of three narrow stages, for CPUs: 77 k parameters for grey images and 10 classes."""
    return _resnet(shape, num_classes, [16, 32, 64], blocks=1, stem_stride=2)


def _vgg(shape: Shape, num_classes: int, stages: list[list[int]]) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = shape[0]
    for stage in stages:
        for width in stage:
            layers += [*_conv_bn(inputs, width), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def vgg16(shape: Shape, num_classes: int) -> nn.Module:
    """VGG16 with BatchNorm for 32x32 images: thirteen convolutions, one linear layer; 14.7 M parameters."""
    return _vgg(shape, num_classes, [[64, 64], [128, 128], [256, 256, 256], [512, 512, 512], [512, 512, 512]])


def small_vgg(shape: Shape, num_classes: int) -> nn.Module:
    """A VGG of four narrow convolutions with BatchNorm, for CPUs: 62 k parameters for colour images and 10 classes."""
    return _vgg(shape, num_classes, [[16], [32], [64, 64]])


def mlp(shape: Shape, num_classes: int) -> nn.Module:
    """Two hidden layers of 128 units, no BatchNorm."""
    inputs = 1
    for size in shape:
        inputs *= size
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, num_classes)
    )


#: Of sequences; all others are of images.
SEQUENCE_MODELS = frozenset({"gpt"})
MODELS: dict[str, Callable[..., nn.Module]] = {
    "small_resnet": small_resnet,
    "small_vgg": small_vgg,
    "mlp": mlp,
    "resnet18": resnet18,
    "vgg16": vgg16,
    "gpt": gpt,
}
