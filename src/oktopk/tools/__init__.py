"""Tools around the library: benchmark, doctor, lab, report, simulator, sweep, job scripts."""
