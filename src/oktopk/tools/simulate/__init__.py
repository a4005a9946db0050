"""How a reduction would go on P ranks: real algorithms, their real messages, and a model of the network.

record.py     the algorithms run on P ranks that are threads; trace.py writes down their messages
sizes.py      a message at the size that was asked for
costs.py      γ: what work costs, measured here by timing.py and coding.py, in time of the processor
calibrate.py  α and β of a link, measured by shifts.py
replay.py     a discrete-event replay of the messages on network.py
study.py      all algorithms on all numbers of ranks     crossings.py   who overtakes whom, and the bounds
"""

from .crossings import Bounds, Crossing, bounds, crossings
from .figure import draw
from .measure.calibrate import calibrate_lab, calibrate_loopback, in_lab
from .measure.costs import Costs, measure
from .network import Network, SimulationError, parse_network
from .report import GIVEN, HALF_GIVEN, report, text
from .study import Answer, Question, simulate
from .trace.format import Recorded, Trace
from .trace.record import Recording, record
from .trace.replay import Prices, Replayed, replay
from .trace.sizes import Scale

__all__ = [
    "GIVEN",
    "HALF_GIVEN",
    "Answer",
    "Bounds",
    "Costs",
    "Crossing",
    "Network",
    "Prices",
    "Question",
    "Recorded",
    "Recording",
    "Replayed",
    "Scale",
    "SimulationError",
    "Trace",
    "bounds",
    "calibrate_lab",
    "calibrate_loopback",
    "crossings",
    "draw",
    "in_lab",
    "measure",
    "parse_network",
    "record",
    "replay",
    "report",
    "simulate",
    "text",
]
