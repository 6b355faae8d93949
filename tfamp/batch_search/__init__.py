"""The batch size that trains fastest within the memory there is, found by trials."""

from tfamp.batch_search.finding import find_batch_size as find_batch_size
from tfamp.batch_search.limits import memory_limit as memory_limit
from tfamp.batch_search.records import BatchSearch as BatchSearch
from tfamp.batch_search.records import Trial as Trial
