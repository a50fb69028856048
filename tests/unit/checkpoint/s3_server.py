"""An S3 server on a loopback port, of moto's, that fails as tests tell it to."""

import contextlib
import gc
import itertools
import socket
import threading
import urllib.request
from dataclasses import dataclass, field

import fsspec.asyn
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

BUCKET = "checkpoints"
KEY = "the-right-key"
_REFUSAL = '<?xml version="1.0"?><Error><Code>{}</Code><Message>{}</Message></Error>'


@dataclass(frozen=True)
class Request:
    """A request for tests to check: ``PUT /bucket/key ?query``."""

    method: str
    path: str
    query: str

    @property
    def is_part(self):
        """True for the upload of a part of a file."""
        return self.method == "PUT" and "uploadId=" in self.query

    @property
    def is_manifest(self):
        return self.path.endswith("/metadata.json")

    @property
    def is_of_tensors(self):
        return self.path.endswith(".safetensors")


@dataclass
class _Fault:
    matches: object
    way: str
    code: str = ""
    hits: list = field(default_factory=list)


class S3Server(ThreadedMotoServer):
    """Started when made. It takes one access key, and loses or refuses requests for as long as it is told to."""

    def __init__(self):
        super().__init__(ip_address="127.0.0.1", port=0, verbose=False)
        self._faults = []
        self.start()
        self.url = "http://{}:{}".format(*self.get_host_and_port())
        self.options = {"key": KEY, "secret": "any", "endpoint_url": self.url}
        # The server answers at once or never: nobody needs to wait and ask again.
        self.options["config_kwargs"] = {"retries": {"max_attempts": 0}}

    def _server_entry(self):
        moto = DomainDispatcherApplication(create_backend_app)

        def application(environ, start_response):
            return self._answer(moto, environ, start_response)

        self._server = make_server(self._ip_address, self._port, application, True, request_handler=_SilentHandler)
        self._server.block_on_close = True
        self._server.daemon_threads = False
        self._server_ready_event.set()
        self._server.serve_forever(poll_interval=0.01)
        self._server.server_close()

    @contextlib.contextmanager
    def refusing(self, matches, code="AccessDenied"):
        """Answer requests for which ``matches(request)`` holds with an error; gives a list of them."""
        with self._failing(_Fault(matches, "refuse", code)) as hits:
            yield hits

    @contextlib.contextmanager
    def losing_answers(self, matches):
        """Do what is asked, and break the connection."""
        with self._failing(_Fault(matches, "lose")) as hits:
            yield hits

    @contextlib.contextmanager
    def cutting(self, matches):
        """Break the connection instead of doing what is asked."""
        with self._failing(_Fault(matches, "cut")) as hits:
            yield hits

    @contextlib.contextmanager
    def watching(self, matches):
        """Only note the requests."""
        with self._failing(_Fault(matches, "watch")) as hits:
            yield hits

    def objects(self, folder):
        """The names in a folder."""
        found = self._list("list_objects_v2", "Contents", folder)
        return sorted(each["Key"].removeprefix(f"{folder}/") for each in found)

    def uploads(self, folder):
        """The names of files whose uploads were neither completed nor aborted."""
        return sorted(each["Key"] for each in self._list("list_multipart_uploads", "Uploads", folder))

    def _list(self, method, kind, folder):
        fs = fsspec.filesystem("s3", **self.options)
        return fs.call_s3(method, Bucket=BUCKET, Prefix=f"{folder}/").get(kind, [])

    @contextlib.contextmanager
    def _failing(self, fault):
        self._faults.append(fault)
        try:
            yield fault.hits
        finally:
            self._faults.remove(fault)

    def _answer(self, moto, environ, start_response):
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""))
        is_known = f"Credential={KEY}/" in environ.get("HTTP_AUTHORIZATION", "")
        if not (is_known or request.path.startswith("/moto-api/")):
            return _refuse(environ, start_response, "InvalidAccessKeyId")
        for fault in list(self._faults):
            if fault.matches(request):
                fault.hits.append(request)
                if fault.way == "refuse":
                    return _refuse(environ, start_response, fault.code)
                if fault.way == "lose":
                    list(moto(environ, lambda *_: None))
                if fault.way != "watch":
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                    raise ConnectionResetError
        return moto(environ, start_response)


class _SilentHandler(MotoRequestHandler):
    def log(self, type, message, *args):  # noqa: A002 - werkzeug's name
        pass


def _refuse(environ, start_response, code):
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    status = "503 Slow" if code in ("SlowDown", "InternalError") else "403 Forbidden"
    start_response(status, [("Content-Type", "application/xml")])
    is_told = environ["REQUEST_METHOD"] != "HEAD"
    return [_REFUSAL.format(code, "the server was told to refuse").encode()] if is_told else []


def number(place):
    """For faults: holds the ``place``-th time that it is called, from 0 on, and after."""
    count, lock = itertools.count(), threading.Lock()

    def is_late():
        with lock:
            return next(count) >= place

    return is_late


@contextlib.contextmanager
def serve():
    """A server with an empty bucket; when it ends, no thread of it or of fsspec's is left."""
    retries, S3FileSystem.retries = S3FileSystem.retries, 1
    server = S3Server()
    try:
        # All servers of a process have one store.
        urllib.request.urlopen(f"{server.url}/moto-api/reset", data=b"").close()
        fsspec.filesystem("s3", **server.options).mkdir(BUCKET)
        yield server
    finally:
        S3FileSystem.retries = retries
        S3FileSystem.clear_instance_cache()
        gc.collect()
        server.stop()
        loop, thread = fsspec.asyn.loop[0], fsspec.asyn.iothread[0]
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        fsspec.asyn.reset_lock()
