"""What a Harbor job of the tests needs beside Harbor: an environment without containers, and an agent without a terminal.

Harbor's own process imports this file; nothing of the router's tests is here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import openai
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

PLACES = ("/logs", "/tests", "/solution", "/app")
"""What tasks and agents call by absolute paths: folders of the trial's own folder here."""


class LocalEnvironment(BaseEnvironment):
    """Runs commands in a temporary folder of this machine, in which the folders of `PLACES` are."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        for place in (*PLACES, "/logs/agent", "/logs/verifier", "/logs/artifacts", "/tmux"):
            (self.root / place[1:]).mkdir(exist_ok=True)

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root)

    def place(self, path: str | Path) -> Path:
        """Where a path of the environment is on this machine."""
        text = str(path)
        return self.root / text[1:] if text.startswith(PLACES) else Path(text)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self.place(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self.place(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self.place(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copy(self.place(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self.place(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        for place in PLACES:
            command = command.replace(f"{place}/", f"{self.root}{place}/")
        # One tmux server for each environment, although all call their session alike.
        values = {**os.environ, "TMUX_TMPDIR": str(self.root / "tmux"), **(self._merge_env(env) or {})}
        values.pop("TMUX", None)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command),
            cwd=self.place(cwd or "/app"),
            env=values,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, error = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            return ExecResult(stdout="", stderr="timeout", return_code=124)
        return ExecResult(stdout=out.decode(), stderr=error.decode(), return_code=process.returncode or 0)


class Talker(BaseAgent):
    """Runs each reply as a command, until the model says `done`. It finds its model at `url`."""

    def __init__(self, logs_dir: Path, model_name: str | None = None, url: str = "", **options: Any) -> None:
        super().__init__(logs_dir, model_name, **options)
        self._url = url
        self._said = 0

    @staticmethod
    def name() -> str:
        return "talker"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": instruction}]
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none", max_retries=30) as client:
            for _ in range(8):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": said})
                if "done" in said:
                    break
                if "fail" in said:
                    raise RuntimeError("the agent gives up")
                result = await environment.exec(said)
                messages.append({"role": "user", "content": (result.stdout or "") + (result.stderr or "")})
        self._said = len(messages)

    def populate_context_post_run(self, context: Any) -> None:
        """As agents do that are installed into an environment: Harbor asks only if their result is empty."""
        context.n_output_tokens = self._said
