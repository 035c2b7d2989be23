"""The texts of the interface, by language. English texts are the keys, so a missing one is English.

Names of actors, errors and endpoints are the program's, and stay as they are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

__all__ = ["LANGUAGES", "Words", "cells", "columns"]

_ZH = {
    "up": "运行",
    "sys": "系统",
    "stopped": "已停止",
    "on": "开",
    "off": "关",
    "host": "主机",
    "proc": "进程",
    "actor": "actor",
    "address": "地址",
    "machine": "机器",
    "processes": "进程数",
    "memory": "内存",
    "virtual memory": "虚拟内存",
    "as of": "数据时间",
    "name": "名称",
    "pid": "进程号",
    "state": "状态",
    "actors": "actor 数",
    "failed actors": "失败的 actor",
    "queued": "排队",
    "queued, most": "最长队列",
    "queued, peak": "队列峰值",
    "last busy": "上次排队",
    "CPU": "CPU 时间",
    "trouble": "故障",
    "status": "状态",
    "type": "类型",
    "instance": "实例",
    "messages": "消息数",
    "processing time": "处理时间",
    "created": "创建时间",
    "last handler": "最近的端点",
    "Execution": "正在执行",
    "Failure": "失败",
    "error": "错误",
    "root cause": "根本原因",
    "failed at": "失败时间",
    "propagated": "由其他 actor 引起",
    "waits for": "等待",
    "nothing is selected": "未选择",
    "lost the server": "与服务器的连接已断开",
    "move": "移动",
    "expand": "展开",
    "collapse all": "全部折叠",
    "system actors": "系统 actor",
    "stopped actors": "已停止的 actor",
    "stacks": "调用栈",
    "settings": "配置",
    "help": "帮助",
    "diagnosis": "诊断",
    "quit": "退出",
    "close": "关闭",
    "again": "刷新",
    "yes": "是",
    "no": "否",
    "asking ...": "正在查询……",
    "unknown": "未知",
}

LANGUAGES = {"en": {}, "zh": _ZH}


class Words:
    """The texts of a language.

    >>> Words("zh")("host"), Words("en")("host")
    ('主机', 'host')
    """

    def __init__(self, language: str) -> None:
        self._texts: dict[str, str] = LANGUAGES[language]

    def __call__(self, english: str) -> str:
        return self._texts.get(english, english)


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes.

    >>> cells("host"), cells("主机")
    (4, 4)
    """
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def columns(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs whose first texts are filled up with spaces, so that the second ones line up."""
    pairs = list(pairs)
    width = max((cells(name) for name, _ in pairs), default=0) + 2
    return [(name + " " * (width - cells(name)), text) for name, text in pairs]
