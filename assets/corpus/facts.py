"""Small facts, in English and Korean, for question-and-answer lines."""

from __future__ import annotations

# English country, English capital, Korean country, Korean capital, flag.
CAPITALS: tuple[tuple[str, str, str, str, str], ...] = (
    ("South Korea", "Seoul", "한국", "서울", "🇰🇷"), ("France", "Paris", "프랑스", "파리", "🇫🇷"),
    ("Japan", "Tokyo", "일본", "도쿄", "🇯🇵"), ("China", "Beijing", "중국", "베이징", "🇨🇳"),
    ("Germany", "Berlin", "독일", "베를린", "🇩🇪"), ("Italy", "Rome", "이탈리아", "로마", "🇮🇹"),
    ("Spain", "Madrid", "스페인", "마드리드", "🇪🇸"), ("Portugal", "Lisbon", "포르투갈", "리스본", "🇵🇹"),
    ("the United Kingdom", "London", "영국", "런던", "🇬🇧"), ("Ireland", "Dublin", "아일랜드", "더블린", "🇮🇪"),
    ("the United States", "Washington, D.C.", "미국", "워싱턴", "🇺🇸"),
    ("Canada", "Ottawa", "캐나다", "오타와", "🇨🇦"),
    ("Mexico", "Mexico City", "멕시코", "멕시코시티", "🇲🇽"), ("Brazil", "Brasilia", "브라질", "브라질리아", "🇧🇷"),
    ("Argentina", "Buenos Aires", "아르헨티나", "부에노스아이레스", "🇦🇷"),
    ("Chile", "Santiago", "칠레", "산티아고", "🇨🇱"),
    ("Peru", "Lima", "페루", "리마", "🇵🇪"), ("Cuba", "Havana", "쿠바", "아바나", "🇨🇺"),
    ("Egypt", "Cairo", "이집트", "카이로", "🇪🇬"), ("Kenya", "Nairobi", "케냐", "나이로비", "🇰🇪"),
    ("Morocco", "Rabat", "모로코", "라바트", "🇲🇦"), ("Ghana", "Accra", "가나", "아크라", "🇬🇭"),
    ("India", "New Delhi", "인도", "뉴델리", "🇮🇳"), ("Thailand", "Bangkok", "태국", "방콕", "🇹🇭"),
    ("Vietnam", "Hanoi", "베트남", "하노이", "🇻🇳"), ("Indonesia", "Jakarta", "인도네시아", "자카르타", "🇮🇩"),
    ("the Philippines", "Manila", "필리핀", "마닐라", "🇵🇭"),
    ("Mongolia", "Ulaanbaatar", "몽골", "울란바토르", "🇲🇳"),
    ("Australia", "Canberra", "호주", "캔버라", "🇦🇺"), ("New Zealand", "Wellington", "뉴질랜드", "웰링턴", "🇳🇿"),
    ("Turkey", "Ankara", "튀르키예", "앙카라", "🇹🇷"), ("Greece", "Athens", "그리스", "아테네", "🇬🇷"),
    ("Austria", "Vienna", "오스트리아", "빈", "🇦🇹"), ("Switzerland", "Bern", "스위스", "베른", "🇨🇭"),
    ("the Netherlands", "Amsterdam", "네덜란드", "암스테르담", "🇳🇱"),
    ("Belgium", "Brussels", "벨기에", "브뤼셀", "🇧🇪"),
    ("Denmark", "Copenhagen", "덴마크", "코펜하겐", "🇩🇰"), ("Norway", "Oslo", "노르웨이", "오슬로", "🇳🇴"),
    ("Sweden", "Stockholm", "스웨덴", "스톡홀름", "🇸🇪"), ("Finland", "Helsinki", "핀란드", "헬싱키", "🇫🇮"),
    ("Poland", "Warsaw", "폴란드", "바르샤바", "🇵🇱"), ("Hungary", "Budapest", "헝가리", "부다페스트", "🇭🇺"),
    ("the Czech Republic", "Prague", "체코", "프라하", "🇨🇿"), ("Ukraine", "Kyiv", "우크라이나", "키이우", "🇺🇦"),
    ("Iceland", "Reykjavik", "아이슬란드", "레이캬비크", "🇮🇸"), ("Nepal", "Kathmandu", "네팔", "카트만두", "🇳🇵"),
)  # fmt: skip

# Thing, verb, colour; then the same in Korean.
COLORS: tuple[tuple[str, str, str, str, str], ...] = (
    ("the sky", "is", "blue", "하늘", "파란색"), ("grass", "is", "green", "풀", "초록색"),
    ("snow", "is", "white", "눈", "하얀색"), ("a banana", "is", "yellow", "바나나", "노란색"),
    ("a strawberry", "is", "red", "딸기", "빨간색"), ("an orange", "is", "orange", "귤", "주황색"),
    ("coal", "is", "black", "석탄", "검은색"), ("an elephant", "is", "gray", "코끼리", "회색"),
    ("chocolate", "is", "brown", "초콜릿", "갈색"), ("a grape", "is", "purple", "포도", "보라색"),
    ("the sea", "is", "blue", "바다", "파란색"), ("a frog", "is", "green", "개구리", "초록색"),
    ("a tomato", "is", "red", "토마토", "빨간색"), ("milk", "is", "white", "우유", "하얀색"),
)  # fmt: skip

# Animal, sound, number of legs, young, home.
CREATURES: tuple[tuple[str, str, str, str, str], ...] = (
    ("cat", "meow", "four", "kitten", "a house"), ("dog", "woof", "four", "puppy", "a kennel"),
    ("cow", "moo", "four", "calf", "a barn"), ("duck", "quack", "two", "duckling", "a pond"),
    ("sheep", "baa", "four", "lamb", "a meadow"), ("pig", "oink", "four", "piglet", "a sty"),
    ("hen", "cluck", "two", "chick", "a coop"), ("lion", "roar", "four", "cub", "the savanna"),
    ("frog", "ribbit", "four", "tadpole", "a pond"), ("owl", "hoot", "two", "owlet", "a hollow tree"),
    ("horse", "neigh", "four", "foal", "a stable"), ("bee", "buzz", "six", "larva", "a hive"),
)  # fmt: skip

KOREAN_SOUNDS: tuple[tuple[str, str], ...] = (
    ("고양이", "야옹"), ("강아지", "멍멍"), ("오리", "꽥꽥"), ("소", "음매"), ("돼지", "꿀꿀"),
    ("병아리", "삐악삐악"),
    ("개구리", "개굴개굴"), ("호랑이", "어흥"), ("참새", "짹짹"), ("닭", "꼬끼오"),
)  # fmt: skip

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("up", "down"), ("day", "night"), ("open", "closed"),
    ("happy", "sad"), ("light", "dark"), ("old", "new"), ("high", "low"), ("long", "short"), ("wet", "dry"),
    ("full", "empty"), ("hard", "soft"), ("early", "late"), ("left", "right"), ("near", "far"), ("strong", "weak"),
)  # fmt: skip

KOREAN_OPPOSITES: tuple[tuple[str, str], ...] = (
    ("낮", "밤"), ("위", "아래"), ("왼쪽", "오른쪽"), ("안", "밖"), ("앞", "뒤"), ("시작", "끝"), ("기쁨", "슬픔"),
    ("빛", "어둠"), ("여름", "겨울"), ("처음", "마지막"),
)  # fmt: skip

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
KOREAN_DAYS: tuple[str, ...] = ("월요일", "화요일", "수요일", "목요일", "금요일", "토요일", "일요일")
MONTHS: tuple[str, ...] = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NUMBERS: tuple[str, ...] = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
KOREAN_NUMBERS: tuple[str, ...] = ("하나", "둘", "셋", "넷", "다섯", "여섯", "일곱", "여덟", "아홉", "열")

TRANSLATIONS: tuple[tuple[str, str], ...] = (
    ("apple", "사과"), ("water", "물"), ("cat", "고양이"), ("dog", "강아지"), ("book", "책"), ("school", "학교"),
    ("friend", "친구"), ("sea", "바다"), ("sky", "하늘"), ("star", "별"), ("tree", "나무"), ("house", "집"),
    ("love", "사랑"), ("hello", "안녕"), ("thank you", "고마워"), ("moon", "달"), ("sun", "해"), ("bread", "빵"),
    ("milk", "우유"), ("flower", "꽃"), ("rain", "비"), ("snow", "눈"), ("lighthouse", "등대"), ("fox", "여우"),
)  # fmt: skip

EMOJI_NAMES: tuple[tuple[str, str, str], ...] = (
    ("a family", "가족", "👨‍👩‍👧‍👦"), ("two mothers and a daughter", "두 엄마와 딸", "👩‍👩‍👧"),
    ("a heart", "하트", "❤️"),
    ("a rainbow", "무지개", "🌈"), ("a smile", "웃는 얼굴", "😊"), ("a fire", "불", "🔥"),
    ("a thumbs up", "엄지", "👍🏽"),
    ("an astronaut", "우주 비행사", "👩‍🚀"), ("a cook", "요리사", "👨‍🍳"), ("a star", "별", "⭐"),
    ("a tree", "나무", "🌳"),
    ("a rocket", "로켓", "🚀"), ("a party", "파티", "🎉"), ("a cat", "고양이", "🐱"), ("the sun", "해", "☀️"),
    ("a waving hand", "흔드는 손", "👋🏻"), ("a pirate flag", "해적 깃발", "🏴‍☠️"), ("a teacher", "선생님", "👩‍🏫"),
)  # fmt: skip
