"""Runs rdma-core's suite, and prints a line for each test: what it did, its name, and why it was skipped."""
import random
import sys
import traceback
import unittest
from importlib.machinery import SourceFileLoader

folder, seed, address = sys.argv[1:]
sys.argv[1:] = []
sys.path[:0] = [folder, folder + '/tests']
random.seed(int(seed))
tests = SourceFileLoader('tests', folder + '/tests/__init__.py').load_module()
from args_parser import parser
parser.parse_args()
# The suite uses the first address of the device's interface as that of the device.
from tests.base import RDMATestCase
RDMATestCase._get_ip_mac = lambda self, *port: self.args.append([*port, address, None])


class Result(unittest.TestResult):
    def say(self, outcome, test, why=''):
        name = test.id().removeprefix('tests.')
        print(f'{outcome:8} {name}' + (': ' + ' '.join(why.split()) if why else ''), flush=True)

    def addSuccess(self, test):
        self.say('ok', test)

    def addSkip(self, test, reason):
        self.say('skipped', test, reason)

    def addFailure(self, test, error):
        self.say('FAILED', test, f'{error[0].__name__}: {error[1]}')
        traceback.print_exception(*error)

    addError = addFailure


unittest.defaultTestLoader.loadTestsFromModule(tests).run(Result())
