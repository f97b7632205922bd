"""Random images with the spectrum of natural ones."""

import numpy as np


def natural(images: np.ndarray) -> np.ndarray:
    """Filters white noise into images whose amplitude falls with the frequency.

    Photographs have amplitudes of about 1/f (Field, "Relations between the statistics of natural
    images and the response properties of cortical cells", 1987), so that neighbours are alike;
    neighbours in white noise are not. What averages over neighbours depends on it.

    Args:
        images: White noise `[batch, height, width, channels]`.

    Returns:
        Images of the same shape and dtype, each channel of mean zero and variance one.
    """
    _, height, width, _ = images.shape
    vertical = np.fft.fftfreq(height)[:, None]
    frequency = np.hypot(vertical, np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(images, axes=(1, 2)) / frequency[None, :, :, None]
    filtered = np.fft.irfft2(spectrum, s=(height, width), axes=(1, 2))
    filtered /= filtered.std((1, 2), keepdims=True)
    return filtered.astype(images.dtype)
