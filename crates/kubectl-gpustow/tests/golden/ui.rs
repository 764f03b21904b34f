//! The page's server: its access rules, its answers, and how it sends them.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::Parser as _;
use kubectl_gpustow::{Args, Screen, run};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

/// The output of the command, as it prints it.
struct Printed(mpsc::UnboundedSender<String>);

impl Write for Printed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.0.send(text).map_err(std::io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Page {
    /// `127.0.0.1:PORT`.
    address: String,
    /// `/SECRET/`.
    path: String,
}

impl Page {
    async fn start() -> Result<Self> {
        let files = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster");
        let args = Args::try_parse_from(["kubectl-gpustow", "--from", files, "ui"])?;
        let (send, mut printed) = mpsc::unbounded_channel();
        tokio::spawn(async move { run(args, &mut Printed(send), Screen::default()).await });
        let mut text = String::new();
        while !text.contains('\n') {
            let more = timeout(SOON, printed.recv()).await?;
            text += &more.context("ended without an address")?;
        }
        let url = text.lines().next().unwrap_or_default();
        let url = url.strip_prefix("http://").context("no address")?;
        let (address, path) = url.split_once('/').context("no path")?;
        Ok(Self {
            address: address.to_owned(),
            path: format!("/{path}"),
        })
    }

    async fn ask(&self, path: &str, host: &str) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        Ok(stream)
    }

    /// Head and body of the answer.
    async fn get(&self, path: &str, host: &str) -> Result<(String, String)> {
        let mut answer = Vec::new();
        let mut stream = self.ask(path, host).await?;
        timeout(SOON, stream.read_to_end(&mut answer)).await??;
        let answer = String::from_utf8(answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        Ok((head.to_lowercase(), body.to_owned()))
    }
}

#[tokio::test]
async fn only_our_own_host_with_the_secret_is_answered() -> Result<()> {
    let page = Page::start().await?;
    let (head, body) = page.get(&page.path, &page.address).await?;
    ensure!(
        head.starts_with("http/1.1 200") && body.starts_with("<!doctype html>"),
        "{head}"
    );
    let (_, port) = page.address.split_once(':').context("a port")?;
    let (head, _) = page.get(&page.path, &format!("localhost:{port}")).await?;
    ensure!(head.starts_with("http/1.1 200"), "{head}");

    for host in [
        "evil.example",
        "127.0.0.1",
        &format!("evil.example:{port}"),
        "127.0.0.1:1",
        "",
    ] {
        for file in ["", "page.js", "events", "why?pod=team-a/large"] {
            let path = format!("{}{file}", page.path);
            let (head, body) = page.get(&path, host).await?;
            ensure!(
                head.starts_with("http/1.1 400"),
                "{host:?} {file:?}: {head}"
            );
            ensure!(!body.contains("team-a"), "{host:?} was told of pods");
        }
    }
    for path in [
        "/",
        "/events",
        "/page.js",
        "/0123456789abcdef/",
        "/../page.js",
    ] {
        let (head, _) = page.get(path, &page.address).await?;
        ensure!(head.starts_with("http/1.1 404"), "{path}: {head}");
    }
    Ok(())
}

#[tokio::test]
async fn every_answer_forbids_what_the_page_does_not_need() -> Result<()> {
    let page = Page::start().await?;
    for file in ["", "page.js", "page.css", "why?pod=team-a/large", "nothing"] {
        let (head, _) = page
            .get(&format!("{}{file}", page.path), &page.address)
            .await?;
        for line in [
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cache-control: no-store",
        ] {
            ensure!(head.contains(line), "{file}: {line} is missing in\n{head}");
        }
        ensure!(
            !head.contains("access-control-"),
            "{file}: other origins are let in"
        );
        ensure!(!head.contains("set-cookie"), "{file}: a cookie is set");
    }
    Ok(())
}

#[tokio::test]
async fn a_new_page_gets_everything_and_why_answers() -> Result<()> {
    let page = Page::start().await?;
    let mut stream = page
        .ask(&format!("{}events", page.path), &page.address)
        .await?;
    let mut seen = String::new();
    let mut chunk = vec![0; 64 << 10];
    while !seen.contains("vision/camera") {
        let read = timeout(SOON, stream.read(&mut chunk)).await??;
        ensure!(read > 0, "the stream ended: {seen}");
        seen += &String::from_utf8_lossy(&chunk[..read]);
    }
    ensure!(seen.contains("content-type: text/event-stream"), "{seen}");
    ensure!(seen.contains("data: {\"full\":true"), "{seen}");

    let (head, body) = page
        .get(&format!("{}why?pod=team-a/large", page.path), &page.address)
        .await?;
    ensure!(head.starts_with("http/1.1 200"), "{head}");
    ensure!(
        body.contains("\"freedBy\":[{\"pod\":\"team-a/notebook\",\"bytes\":21474836480}]"),
        "{body}"
    );
    let (head, _) = page
        .get(&format!("{}why?pod=no/body", page.path), &page.address)
        .await?;
    ensure!(head.starts_with("http/1.1 404"), "{head}");
    Ok(())
}

#[tokio::test]
async fn it_listens_on_this_machine_alone() -> Result<()> {
    let files = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster");
    let words = [
        "kubectl-gpustow",
        "--from",
        files,
        "ui",
        "--listen",
        "0.0.0.0:0",
    ];
    let error = run(
        Args::try_parse_from(words)?,
        &mut Vec::new(),
        Screen::default(),
    )
    .await
    .err();
    let error = error.context("it serves everybody")?.to_string();
    assert!(error.contains("use a loopback address"), "{error}");
    Ok(())
}
