"""What features make for the engine has the types that the engine expects."""

from monarch._engine.runtime.agent.output import Output
from monarch._engine.runtime.proc.printer import Printer
from monarch._output.captured import CapturedOutput
from monarch._output.printer import LogPrinter

output: type[Output] = CapturedOutput
printer: type[Printer] = LogPrinter
