//! `advise --prometheus`, and its output for servers of every sort.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use gpustow_advice::History;
use gpustow_api::workload::ContainerHistory;
use gpustow_pack::Mib;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::objects::{self, Files, waiting};

/// MiB of a GPU.
const GPU: u64 = 24_000;
const GIB: u64 = 1024;

/// Serves the answer for a path with its query, only to clients with the token `secret` if `guarded`.
async fn serve(
    guarded: bool,
    answer: impl Fn(&str) -> (u16, String) + Send + Sync + 'static,
) -> Result<SocketAddr> {
    let answer = Arc::new(answer);
    let handle = async move |request: Request| {
        let token = request.headers().get(header::AUTHORIZATION);
        let known = token.is_some_and(|it| it == "Bearer secret");
        let (status, body) = match known || !guarded {
            true => answer(&request.uri().to_string()),
            false => (401, String::new()),
        };
        (StatusCode::from_u16(status).unwrap_or_default(), body)
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let app = Router::new().fallback(handle);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

fn success(result: &[Value]) -> (u16, String) {
    let body = json!({ "status": "success", "data": { "result": result } });
    (200, body.to_string())
}

/// A number of the query.
fn number(query: &str, name: &str) -> i64 {
    let after = query.split_once(&format!("{name}=")).map_or("", |it| it.1);
    let digits = after.split('&').next().unwrap_or_default();
    let bytes = digits.split('%').skip(1);
    let byte = bytes.filter_map(|it| u8::from_str_radix(it, 16).ok());
    let text: String = byte.map(char::from).collect();
    text.parse().unwrap_or(0)
}

fn size() -> Value {
    json!({ "metric": { "UUID": "GPU-n" }, "value": [0, GPU.to_string()] })
}

/// A series of a pod on a GPU: so many MiB in each of the query's minutes.
fn on(query: &str, gpu: &str, pod: &str, mib: impl Fn(i64) -> String) -> Value {
    let minutes = (number(query, "start")..=number(query, "end")).step_by(60);
    let values: Vec<_> = minutes.map(|at| json!([at, mib(at)])).collect();
    json!({
        "metric": { "namespace": "ops", "pod": pod, "container": "main", "UUID": gpu }, "values": values,
    })
}

fn series(query: &str, pod: &str, mib: impl Fn(i64) -> String) -> Value {
    on(query, "GPU-n", pod, mib)
}

/// The last second of the requested time.
fn end() -> i64 {
    (Timestamp::now().as_second() / 60 + 1) * 60
}

/// A pod with whole GPUs, ten minutes old.
fn holder(kind: &str, owner: &str, gpus: u64) -> Value {
    let mut pod = waiting(&format!("{owner}-1"), "");
    let created = Timestamp::from_second(end() - 660).map(|it| it.to_string());
    pod["metadata"]["creationTimestamp"] = json!(created.unwrap_or_default());
    pod["metadata"]["ownerReferences"] = objects::owner(kind, owner);
    pod["spec"]["containers"][0]["image"] = json!("app:1");
    pod["spec"]["containers"][0]["resources"] =
        json!({ "limits": { "nvidia.com/gpu": gpus.to_string() } });
    pod["status"] = json!({ "phase": "Running" });
    pod
}

/// A pod of a ReplicaSet with two GPUs, and one of a StatefulSet.
fn objects() -> Vec<Value> {
    let mut web = holder("ReplicaSet", "web-5f9474c99c", 2);
    web["metadata"]["generateName"] = json!("web-5f9474c99c-");
    web["metadata"]["labels"] = json!({ "pod-template-hash": "5f9474c99c" });
    vec![web, holder("StatefulSet", "db", 1)]
}

async fn rows(files: &Files, flags: &str) -> Result<Vec<Value>> {
    let (_, printed) = files.ask(&format!("advise {flags} -o json")).await?;
    let list: Value = serde_json::from_str(&printed)?;
    Ok(list["items"].as_array().context(printed)?.clone())
}

#[tokio::test]
async fn containers_with_whole_gpus_are_advised_before_gpustow_is_installed() -> Result<()> {
    let address = serve(true, |query| {
        if !query.starts_with("/sub/api/v1/query_range?") {
            return success(&[size()]);
        }
        // A day of a pod that is gone, at 9 GiB once in 150 minutes; before that a week of another template.
        let gone = |at: i64| match (at < end() - 86_400, at / 60 % 150) {
            (true, _) => "0".to_owned(),
            (false, 0) => (9 * GIB).to_string(),
            (false, _) => (4 * GIB).to_string(),
        };
        let of_exporter = |mut series: Value| {
            let labels = series["metric"].as_object().cloned().unwrap_or_default();
            for (name, value) in labels.iter().filter(|(name, _)| *name != "UUID") {
                series["metric"][format!("exported_{name}")] = value.clone();
                series["metric"][name] = json!("dcgm-exporter");
            }
            series
        };
        success(&[
            of_exporter(series(query, "web-5f9474c99c-x2x2x", gone)),
            on(query, "GPU-o", "web-aaaaaaaaaa-x2x2x", |_| {
                (20 * GIB).to_string()
            }),
            // One before had this name.
            on(query, "GPU-p", "db-1", |_| GIB.to_string()),
        ])
    })
    .await?;
    let files = Files::new("prometheus", &objects())?;
    let token = files.file("token", &json!("secret"))?;
    std::fs::write(&token, "secret\n")?;
    let flags =
        format!("--prometheus http://{address}/sub/ --prometheus-token-file {token} -n ops");
    let rows = rows(&files, &flags).await?;
    let [web, db] = &rows[..] else {
        panic!("{rows:#?}")
    };
    assert_eq!(web["workload"], "deployment/web");
    assert_eq!(web["samples"], 1441);
    let mib = |key: &str| web[key].as_u64().unwrap_or_default() >> 20;
    assert_eq!(
        (mib("requestedBytes"), mib("peakBytes")),
        (2 * GPU, 18 * GIB)
    );
    assert!((8 * GIB..9 * GIB).contains(&mib("advisedBytes")), "{web:#}");
    assert_eq!(mib("freesBytes"), 2 * GPU - mib("advisedBytes"));
    let patch: Value = serde_json::from_str(web["patch"].as_str().context("no patch")?)?;
    let template = &patch["spec"]["template"];
    assert_eq!(
        template["metadata"]["annotations"]["gpu-count.gpustow.dev/main"],
        "2"
    );
    let amounts =
        json!({ "nvidia.com/gpu": null, "gpustow.dev/gpu-mem": mib("advisedBytes").to_string() });
    let resources = &template["spec"]["containers"][0]["resources"];
    assert_eq!(
        *resources,
        json!({ "limits": amounts, "requests": amounts })
    );
    // The pod is ten minutes old, and the size of its GPU is unknown.
    assert_eq!(db["notes"], json!(["no history yet"]));
    Ok(())
}

/// MiB of one of two replicas at a minute.
type Use = fn(i64, usize) -> u64;

#[tokio::test]
async fn prometheus_gives_the_advice_of_an_own_history_of_the_same_use() -> Result<()> {
    let uses: [Use; 3] = [
        |at, _| {
            if (540..600).contains(&(at % 1440)) {
                16_000
            } else {
                4_000
            }
        },
        |at, pod| if at % 90 == pod as i64 { 12_000 } else { 5_000 },
        |at, pod| 4_000 * (1 + pod as u64) + at as u64 % 7 * 100,
    ];
    // The last minutes are left out, so that none passes meanwhile.
    let times = end() - 3 * 86_400..end() - 600;
    for used in uses {
        let mut own = History::default();
        for at in times.clone().step_by(60) {
            (0..2).for_each(|pod| own.add(Mib(used(at / 60, pod)), at));
        }
        let own = ContainerHistory::new("main", "app:1", Mib(GPU), &own);
        let known = times.clone();
        let address = serve(false, move |query| {
            let replica = |gpu: &str, pod: usize| {
                on(query, gpu, &format!("web-5f9474c99c-x2x2{pod}"), |at| {
                    let used = known.contains(&at).then(|| used(at / 60, pod));
                    used.unwrap_or(0).to_string()
                })
            };
            match query.starts_with("/api/v1/query_range") {
                true => success(&[replica("GPU-n", 0), replica("GPU-o", 1)]),
                false => {
                    let mut other = size();
                    other["metric"]["UUID"] = json!("GPU-o");
                    success(&[size(), other])
                }
            }
        })
        .await?;
        let files = Files::new("prometheus-own", &objects())?;
        for (flag, permille) in [
            ("", None),
            ("--quantile p95", Some(950)),
            ("--quantile p99", Some(990)),
        ] {
            let rows = rows(
                &files,
                &format!("--prometheus http://{address} -n ops {flag}"),
            )
            .await?;
            let web = rows.iter().find(|it| it["workload"] == "deployment/web");
            let web = web.context("no row")?;
            let advice = own.advise(permille).context("no advice")?;
            let mib = |key: &str| Mib((web[key].as_u64().unwrap_or_default() >> 20) / 2);
            assert_eq!(
                (mib("advisedBytes"), mib("limitBytes"), &web["samples"]),
                (advice.request, advice.limit, &json!(advice.samples)),
                "{flag}: {web:#}"
            );
            let notes: Vec<_> = advice.cautions.iter().map(ToString::to_string).collect();
            assert_eq!(web["notes"], json!(notes), "{flag}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn minutes_in_which_pods_share_a_gpu_count_for_none_of_them() -> Result<()> {
    let address = serve(false, |query| {
        match query.starts_with("/api/v1/query_range") {
            true => success(
                &["web-5f9474c99c-1", "db-1"].map(|pod| series(query, pod, |_| GIB.to_string())),
            ),
            false => success(&[size()]),
        }
    })
    .await?;
    let files = Files::new("prometheus-shared", &objects())?;
    let rows = rows(&files, &format!("--prometheus http://{address} -A")).await?;
    ensure!(rows.len() == 2, "{rows:#?}");
    for row in rows {
        assert_eq!(
            row["notes"][0],
            "shares its GPU, of which dcgm-exporter reports the sum"
        );
        assert_eq!(row["patch"], Value::Null);
    }
    Ok(())
}

#[tokio::test]
async fn queries_name_the_minutes_the_namespace_and_the_labels() -> Result<()> {
    let address = serve(false, |query| {
        let wanted = "exported_namespace=\"ops\",cluster=\"a,b\",region=~\"eu.*\"";
        let wanted: String = wanted.bytes().map(|it| format!("%{it:02X}")).collect();
        let is_whole = number(query, "end") - number(query, "start") == 119 * 60;
        match query.starts_with("/api/v1/query_range") {
            true if is_whole && query.contains(&wanted) => {
                success(&[series(query, "other", |_| GIB.to_string())])
            }
            true => (400, json!({ "error": query }).to_string()),
            false => success(&[size()]),
        }
    })
    .await?;
    let files = Files::new("prometheus-queries", &objects())?;
    let flags = format!(
        "--prometheus http://{address} --prometheus-labels cluster=\"a,b\",region=~\"eu.*\""
    );
    let rows = rows(&files, &format!("{flags} -n ops --days 1")).await?;
    let notes: Vec<_> = rows.iter().map(|it| &it["notes"]).collect();
    assert_eq!(notes, [&json!(["no history yet"]); 2]);
    Ok(())
}

#[tokio::test]
async fn rubbish_is_no_history() -> Result<()> {
    let address = serve(false, |query| {
        if !query.starts_with("/api/v1/query_range") {
            let bad = json!({ "metric": { "UUID": "GPU-n" }, "value": [0, "1e300"] });
            return success(&[json!({ "metric": {} }), bad, size()]);
        }
        let rubbish = ["NaN", "+Inf", "-5", "1e300", "", "many", "0"];
        let rubbish = |at: i64| rubbish[at as usize / 60 % rubbish.len()].to_owned();
        let pod = "web-5f9474c99c-x2x2x";
        let mut early = series(query, pod, |_| GIB.to_string());
        early["values"] = json!([[-1e300, GIB.to_string()], [0, GIB.to_string()]]);
        success(&[
            on(query, "GPU-o", pod, rubbish),
            on(query, "GPU-p", "äöü", |_| GIB.to_string()),
            on(query, "GPU-q", "web-5f9474c99c-äx", |_| GIB.to_string()),
            early,
            json!({ "metric": { "namespace": "ops" } }),
        ])
    })
    .await?;
    let files = Files::new("prometheus-rubbish", &objects())?;
    for row in rows(&files, &format!("--prometheus http://{address} -A")).await? {
        assert_eq!(row["notes"], json!(["no history yet"]));
    }
    Ok(())
}

/// A path with its query, and the answer to it.
type Says = fn(&str) -> (u16, String);

#[tokio::test]
async fn each_error_says_what_to_do() -> Result<()> {
    let files = Files::new("prometheus-errors", &objects())?;
    let cases: [(Says, &str); 8] = [
        (|_| (401, String::new()), "--prometheus-token-file"),
        (|_| (403, "<html>".to_owned()), "--prometheus-token-file"),
        (|_| (404, "<html>".to_owned()), "check the address"),
        (|_| (302, String::new()), "check the address"),
        (
            |_| (200, json!({ "data": { "result": [0, "1"] } }).to_string()),
            "check the address",
        ),
        (
            |_| (422, json!({ "error": "too many samples" }).to_string()),
            "422 Unprocessable Entity: too many samples",
        ),
        (|_| success(&[]), "dcgm-exporter"),
        (
            |query| match query.starts_with("/api/v1/query_range") {
                true => success(&[]),
                false => success(&[size()]),
            },
            "DCGM_EXPORTER_KUBERNETES=true",
        ),
    ];
    for (answer, wanted) in cases {
        let address = serve(false, answer).await?;
        let said = files
            .ask(&format!("advise --prometheus http://{address}"))
            .await;
        let said = format!("{:#}", said.err().context(wanted)?);
        ensure!(said.contains(wanted), "{said}");
    }
    let endless = serve(false, |_| (200, " ".repeat(65 << 20))).await?;
    let closed = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    for (flags, wanted) in [
        (format!("--prometheus http://{endless}"), "more than 64 MiB"),
        (format!("--prometheus http://{closed}"), "cannot reach"),
        ("--prometheus localhost:9090".to_owned(), "http://localhost"),
        ("--prometheus http://a:b@c".to_owned(), "token-file"),
        (
            format!("--prometheus http://{closed} --prometheus-ca-file /none"),
            "cannot read /none",
        ),
        ("--days 3".to_owned(), "--prometheus"),
    ] {
        let said = files.ask(&format!("advise {flags}")).await;
        let said = format!("{:#}", said.err().context(flags)?);
        ensure!(said.contains(wanted), "{said}");
    }
    Ok(())
}
