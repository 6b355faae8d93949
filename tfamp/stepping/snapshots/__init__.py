"""Snapshots of all that training writes: in memory, and in files that are whole."""

from tfamp.stepping.snapshots.files import read as read
from tfamp.stepping.snapshots.files import write as write
from tfamp.stepping.snapshots.state import State as State
from tfamp.stepping.snapshots.state import digest as digest
from tfamp.stepping.snapshots.state import first_nonfinite as first_nonfinite
from tfamp.stepping.snapshots.state import names_of_replicas as names_of_replicas
from tfamp.stepping.snapshots.state import num_local_replicas as num_local_replicas
from tfamp.stepping.snapshots.state import num_nonfinite as num_nonfinite
from tfamp.stepping.snapshots.state import put as put
from tfamp.stepping.snapshots.state import take as take
