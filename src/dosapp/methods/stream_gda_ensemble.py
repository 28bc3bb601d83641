"""Stream-GDA with the frozen CLIP: Gaussians of its features predict and label the stream, too.

Not in the paper (docs/beyond.md). Trained features f are better where there is much to learn, the
pretrained model's f_0 where training does harm; their log-likelihoods are added:

    labels = argmax_c  GDA_c(f) + GDA_c(f_0) + scale · f·t_c
"""

from dosapp.methods.base import method_dataclass
from dosapp.methods.stream_gda import StreamGDA


@method_dataclass
class StreamGDAEnsemble(StreamGDA):
    """Stream-GDA, with the log-likelihoods of the frozen CLIP's class Gaussians added."""

    summary = "Stream-GDA; class Gaussians of the frozen CLIP predict and label, too"
    head_ensemble = True
