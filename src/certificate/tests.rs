use axum::body::Body;
use axum::http::Response;
use tower::service_fn;

use super::*;

const DAY: i64 = 24 * 60 * 60;

fn days(days: i64) -> SignedDuration {
    SignedDuration::from_secs(days * DAY)
}

/// It has asked an API server whose clock this node's is so far ahead of.
async fn keeper(ahead: SignedDuration) -> Keeper {
    let service = service_fn(move |_: Request<kube::client::Body>| {
        let date = (Timestamp::now() - ahead).strftime("%a, %d %b %Y %H:%M:%S GMT");
        let answer = Response::builder()
            .status(404)
            .header(header::DATE, date.to_string());
        async { Ok::<_, kube::Error>(answer.body(Body::empty()).unwrap()) }
    });
    let client = Client::new(service, "default");
    let (mut keeper, _) = Keeper::new(client, "extender-0");
    let configuration = keeper.configuration().await;
    assert!(configuration.unwrap().is_none());
    keeper
}

/// The next step for a Secret with these contents, by the keeper's clock.
fn after(keeper: &Keeper, found: Option<&Kept>) -> Step {
    let seen = Seen {
        found,
        kept: None,
        bundle: None,
        settled: false,
        forgotten: true,
        now: keeper.now(),
    };
    next(&seen).unwrap()
}

#[tokio::test]
async fn keeper_goes_by_the_clock_of_the_api_server() {
    for ahead in [days(0), days(2), days(-2)] {
        let wrong = Timestamp::now() - ahead - keeper(ahead).await.now();
        // The header omits fractions of a second.
        assert!(wrong.get_seconds().abs() <= 5, "{ahead}: {wrong}");
    }
}

#[tokio::test]
async fn certificate_is_renewed_when_the_api_server_says_that_it_is_due() {
    let Step::Write(kept) = after(&keeper(days(0)).await, None) else {
        panic!("no certificate was made");
    };
    assert_eq!(after(&keeper(days(0)).await, Some(&kept)), Step::Wait);
    // In this case, this node's clock is wrong.
    assert_eq!(after(&keeper(days(59)).await, Some(&kept)), Step::Wait);
    let due = after(&keeper(days(-61)).await, Some(&kept));
    assert!(matches!(due, Step::Write(renewed) if renewed.next.is_some()));
}
