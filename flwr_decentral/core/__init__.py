"""What an algorithm is: machines, events, commands, and the vocabulary they need.

Nothing here does I/O (a topology file aside, which is read before a run), reads a clock or draws
from a global generator. See :mod:`flwr_decentral.core.algorithm` for the contract and a complete
example.
"""

from . import mixing, pairing, spectra, topology, trees
from .algorithm import Algorithm, Capabilities, Machine, Site
from .clock import MILLISECOND, SECOND, from_seconds, to_seconds
from .commands import Command, DropQueued, Halt, Report, Send, SetTimer, Train
from .errors import (
    AlgorithmError,
    ConfigurationError,
    DecentralError,
    PeerError,
    RuntimeFault,
    error_of,
    suggest,
)
from .events import (
    Event,
    LinkIdle,
    PeerDown,
    PeerUp,
    Received,
    Started,
    Stopped,
    TimerFired,
    TrainDone,
    TrainFailed,
)
from .fragments import (
    Contiguous,
    Interleaved,
    Layerwise,
    Partition,
    Rotation,
    default_granularity,
)
from .inbox import InboxMachine, check_degree
from .layout import Layout
from .mailbox import Letter, Mailbox
from .message import HEADER_BYTES, Message, Vector, message_bytes
from .mixing import metropolis_hastings, metropolis_weight, second_eigenvalue, spectral_gap
from .pairwise import PairwiseAlgorithm, PairwiseMachine
from .seeds import NodeSeeds, Seeds
from .state import Part
from .trees import Tree
from .wire import WIRES, Wire, check_wire, wire_bytes

__all__ = [
    "HEADER_BYTES",
    "MILLISECOND",
    "SECOND",
    "WIRES",
    "Algorithm",
    "AlgorithmError",
    "Capabilities",
    "Command",
    "ConfigurationError",
    "Contiguous",
    "DecentralError",
    "DropQueued",
    "Event",
    "Halt",
    "InboxMachine",
    "Interleaved",
    "Layerwise",
    "Layout",
    "Letter",
    "LinkIdle",
    "Machine",
    "Mailbox",
    "Message",
    "NodeSeeds",
    "PairwiseAlgorithm",
    "PairwiseMachine",
    "Part",
    "Partition",
    "PeerDown",
    "PeerError",
    "PeerUp",
    "Received",
    "Report",
    "Rotation",
    "RuntimeFault",
    "Seeds",
    "Send",
    "SetTimer",
    "Site",
    "Started",
    "Stopped",
    "TimerFired",
    "Train",
    "TrainDone",
    "TrainFailed",
    "Tree",
    "Vector",
    "Wire",
    "check_degree",
    "check_wire",
    "default_granularity",
    "error_of",
    "from_seconds",
    "message_bytes",
    "metropolis_hastings",
    "metropolis_weight",
    "mixing",
    "pairing",
    "second_eigenvalue",
    "spectra",
    "spectral_gap",
    "suggest",
    "to_seconds",
    "topology",
    "trees",
    "wire_bytes",
]
