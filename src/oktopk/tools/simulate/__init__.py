"""Predict an all-reduce on P ranks: real algorithms, their recorded messages, and a network model.

trace/record.py       runs the algorithms on P ranks, as threads; trace/format.py records their messages
trace/sizes.py        scales messages to the requested size
trace/replay.py       a discrete-event replay of the messages on the model in network.py
measure/costs.py      γ: the CPU time of a rank's work, measured by timing.py and coding.py
measure/calibrate.py  α and β of a link, measured by link_times.py
study.py              all algorithms on all numbers of ranks
crossings.py          where one algorithm overtakes another, and the bounds
"""

from .crossings import Bounds, Crossing, bounds, find_crossings
from .measure.calibrate import calibrate_in, calibrate_lab, calibrate_loopback
from .measure.costs import Costs, measure
from .network import Network, SimulationError, parse_network
from .plot import draw
from .report import GIVEN, HALF_GIVEN, report, text
from .study import Answer, Question, simulate
from .trace.format import RecordingCommunicator, Trace
from .trace.record import Recording, record
from .trace.replay import Prices, ReplayedStep, replay
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
    "Recording",
    "RecordingCommunicator",
    "ReplayedStep",
    "Scale",
    "SimulationError",
    "Trace",
    "bounds",
    "calibrate_in",
    "calibrate_lab",
    "calibrate_loopback",
    "draw",
    "find_crossings",
    "measure",
    "parse_network",
    "record",
    "replay",
    "report",
    "simulate",
    "text",
]
