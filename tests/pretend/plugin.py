"""`pytest -p pretend.plugin`: the tests believe that there is a CUDA device."""

from pretend import device, graphs

device.install()
graphs.install()
